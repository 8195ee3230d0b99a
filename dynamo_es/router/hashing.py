"""Block hashes and sequence hashes, bit for bit those of Dynamo (``compute_block_hash_for_seq`` of release 1.5.1).

A *tokens hash* names the tokens of one block, with what else decides whether its KV values can be reused: LoRA, cache
namespace, multimodal objects. It is XXH3-64 over the tokens as little-endian u32, then the sorted multimodal hashes as
little-endian u64. LoRA and cache namespace enter through the seed: ``1337 + XXH3(lora, seed 0) + XXH3(namespace,
seed 1)``, modulo 2^64; the different inner seeds keep an adapter and a namespace of the same name apart.

A *sequence hash* commits to the whole prefix: the first is the first tokens hash, each later one is XXH3-64 over the
previous sequence hash and the tokens hash, with seed 1337 whatever the block seed is.

Two levels: ``compute_block_hash_for_seq`` and ``lora_name_to_id`` are Dynamo's functions with its argument checking;
the rest is for callers that hold good values already. All hashes are unsigned 64-bit unless a name says ``signed``.
"""

from __future__ import annotations

import string
import sys
from array import array
from collections.abc import Sequence
from itertools import islice
from struct import Struct, pack
from typing import Any

from blake3 import blake3
from xxhash import xxh3_64_intdigest

from dynamo_es.router.hashing_arguments import check_arguments, check_name

HASH_SEED = 1337
HASH_ALGORITHM = "public-xxh3-v1"
_U64_MASK = 2**64 - 1
_I64_LIMIT = 2**63
_LORA_ID_MASK = 0x7FFF_FFFF
_PAD_BASE = 1_000_000
_PAD_MASK = 2**30 - 1
_HEX_IDENTIFIER_DIGITS = 64
_HEX_DIGITS = frozenset(string.hexdigits)
_U64_PAIR = Struct("<QQ")
_NO_OBJECTS: tuple[int, ...] = ()


def compute_block_hash_for_seq(
    tokens: Sequence[int],
    kv_block_size: int,
    block_mm_infos: Sequence[dict[str, Any] | None] | None = None,
    lora_name: str | None = None,
    is_eagle: bool | None = None,
    cache_namespace: str | None = None,
) -> list[int]:
    """Tokens hash of every complete block of ``tokens``; Dynamo's function, errors included.

    Args:
        tokens: Token ids, each a u32.
        kv_block_size: Tokens a block.
        block_mm_infos: For block i ``{"mm_objects": [{"mm_hash": u64, "offsets": [[start, end], ...]}, ...]}`` or
            None. Offsets never change a hash; entries beyond the last block are checked and otherwise ignored.
        lora_name: Adapter; an empty string counts as None.
        is_eagle: Windows are one token longer than the stride, as EAGLE's draft model needs.
        cache_namespace: Cache salt or tenant; an empty string counts as None.

    Raises:
        TypeError: An argument, or a token, is of the wrong type.
        OverflowError: A token is no u32, or the block size no u64.
        ValueError: The block size is 0.
        Exception: ``block_mm_infos`` is malformed (exactly this class, as in Dynamo).
    """
    packed, block_size, mm_hashes = check_arguments(
        tokens, kv_block_size, block_mm_infos, lora_name, is_eagle, cache_namespace
    )
    seed = block_seed(lora_name, cache_namespace)
    return hash_blocks(packed, block_size, seed, is_eagle=bool(is_eagle), mm_hashes=mm_hashes)


def lora_name_to_id(lora_name: str) -> int:
    """Engine-side id of an adapter: 31 bits of its name's BLAKE3. Raises TypeError if it is no str."""
    digest = blake3(check_name("lora_name", lora_name).encode()).digest(8)
    return int.from_bytes(digest, "big") & _LORA_ID_MASK


def block_seed(lora_name: str | None = None, cache_namespace: str | None = None) -> int:
    """Seed of the tokens hashes for an adapter and a cache namespace; empty is the same as none."""
    seed = HASH_SEED
    if lora_name:
        seed += xxh3_64_intdigest(lora_name.encode(), 0)
    if cache_namespace:
        seed += xxh3_64_intdigest(cache_namespace.encode(), 1)
    return seed & _U64_MASK


def hash_blocks(
    tokens: Sequence[int],
    block_size: int,
    seed: int = HASH_SEED,
    *,
    is_eagle: bool = False,
    mm_hashes: Sequence[Sequence[int]] = (),
) -> list[int]:
    """Tokens hash of every complete block; an incomplete tail is dropped.

    Args:
        tokens: Token ids; a list or an ``array('I')`` is fastest.
        block_size: Tokens a block, at least 1.
        seed: From ``block_seed`` or ``derive_tracking_seeds``.
        is_eagle: As in ``compute_block_hash_for_seq``.
        mm_hashes: For block i the u64 hashes of its multimodal objects, in any order; may be shorter than the blocks.

    Raises:
        OverflowError: A token is no u32.
        TypeError: A token is no int.
    """
    packed = _pack_tokens(tokens)
    if is_eagle or mm_hashes:
        return _hash_windows(packed, block_size, seed, is_eagle, mm_hashes)
    whole = len(packed) // block_size * block_size
    if not whole:
        return []
    window = Struct(f"{4 * block_size}s")
    digest = xxh3_64_intdigest
    return [digest(block, seed) for (block,) in window.iter_unpack(memoryview(packed)[:whole])]


def compute_sequence_hashes(
    block_hashes: Sequence[int], parent: int | None = None, chain_seed: int = HASH_SEED
) -> list[int]:
    """Sequence hash of every block of a chain.

    Args:
        block_hashes: Tokens hashes, in order.
        parent: Sequence hash of the block before the first one; None at the start of a prompt.
        chain_seed: 1337 but for keyed tracking identities.
    """
    if not block_hashes:
        return []
    pair, digest = _U64_PAIR.pack, xxh3_64_intdigest
    previous = block_hashes[0] if parent is None else digest(pair(parent, block_hashes[0]), chain_seed)
    hashes = [previous]
    append = hashes.append
    for block_hash in islice(block_hashes, 1, None):
        previous = digest(pair(previous, block_hash), chain_seed)
        append(previous)
    return hashes


def hash_prompt(
    tokens: Sequence[int], block_size: int, seed: int = HASH_SEED, *, is_eagle: bool = False
) -> tuple[list[int], list[int]]:
    """Tokens hashes and sequence hashes of a prompt's complete blocks."""
    block_hashes = hash_blocks(tokens, block_size, seed, is_eagle=is_eagle)
    return block_hashes, compute_sequence_hashes(block_hashes)


def to_signed(value: int) -> int:
    """A u64 as the i64 with the same bits: how Dynamo's JSON shows sequence hashes."""
    return value - 2**64 if value >= _I64_LIMIT else value


def to_unsigned(value: int) -> int:
    """An i64 (or u64) as the u64 with the same bits."""
    return value & _U64_MASK


def mm_identifier_hash(identifier: str) -> int | None:
    """u64 of a multimodal object's identifier; None for an empty one.

    A content hash of 64 hexadecimal digits gives its first 16, anything else its XXH3-64.
    """
    if not identifier:
        return None
    if len(identifier) == _HEX_IDENTIFIER_DIGITS and _HEX_DIGITS.issuperset(identifier):
        return int(identifier[:16], 16)
    return xxh3_64_intdigest(identifier.encode(), 0)


def mm_pad_value(mm_hash: int) -> int:
    """Token id that stands for the placeholder tokens of the object ``mm_hash`` (u32, outside of any vocabulary)."""
    return _PAD_BASE + (mm_hash & _PAD_MASK)


def _pack_tokens(tokens: Sequence[int]) -> array[int]:
    if isinstance(tokens, (bytes, bytearray)):
        # array() would take these for packed values; to everyone else they are sequences of small ints.
        tokens = list(tokens)
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed


def _hash_windows(
    packed: array[int], block_size: int, seed: int, is_eagle: bool, mm_hashes: Sequence[Sequence[int]]
) -> list[int]:
    extra = int(is_eagle)
    data = packed.tobytes()
    hashes = []
    for index in range(max(len(packed) - extra, 0) // block_size):
        start = index * block_size
        window = data[4 * start : 4 * (start + block_size + extra)]
        objects = mm_hashes[index] if index < len(mm_hashes) else _NO_OBJECTS
        if objects:
            window += pack(f"<{len(objects)}Q", *sorted(objects))
        hashes.append(xxh3_64_intdigest(window, seed))
    return hashes

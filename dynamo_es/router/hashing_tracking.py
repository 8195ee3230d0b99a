"""Keyed tracking identities (``keyed-xxh3-v1``), bit for bit those of Dynamo.

They name blocks in the accounting of active sequences only, never in the index. The seeds of block and chain come from
a keyed BLAKE3 over everything that separates tenants, each field framed by tag and length, so that no two scopes share
a seed (``org_1`` + ``2345`` is not ``org_12345``), and who lacks the key cannot relate identities to prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from blake3 import blake3

from dynamo_es.errors import InvalidArgument
from dynamo_es.router.hashing import compute_sequence_hashes, hash_blocks

TRACKING_ALGORITHM = "keyed-xxh3-v1"
KEY_BYTES = 32
_DOMAIN = b"dynamo.router.tracking-hash/keyed-xxh3-v1\x00"


@dataclass(frozen=True, slots=True)
class TrackingScope:
    """Requests that may share tracked blocks. An empty namespace or adapter is the same as none."""

    model_name: str
    routing_group: str
    block_size: int
    cache_namespace: str | None = None
    lora_name: str | None = None
    is_eagle: bool = False


class TrackingSeeds(NamedTuple):
    """Seed of the block hashes, and of the chain of sequence hashes."""

    block_seed: int
    chain_seed: int


def derive_tracking_seeds(key: bytes, key_id: str, scope: TrackingScope) -> TrackingSeeds:
    """Seeds of a scope under a key; costs a few microseconds, so keep them for the scope.

    Raises:
        InvalidArgument: The key is not 32 bytes long.
    """
    if len(key) != KEY_BYTES:
        raise InvalidArgument(f"a tracking key has {KEY_BYTES} raw bytes, this one has {len(key)}")
    frames = (
        _DOMAIN,
        _frame(1, key_id.encode()),
        _frame(2, scope.model_name.encode()),
        _frame(3, scope.routing_group.encode()),
        _frame(4, scope.block_size.to_bytes(4, "little")),
        _optional_frame(5, scope.cache_namespace),
        _optional_frame(6, scope.lora_name),
        _frame(7, bytes((scope.is_eagle,))),
    )
    digest = blake3(b"".join(frames), key=key).digest(16)
    return TrackingSeeds(int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little"))


def compute_tracking_hashes(
    tokens: Sequence[int], scope: TrackingScope, seeds: TrackingSeeds, mm_hashes: Sequence[Sequence[int]] = ()
) -> list[int]:
    """Tracking identity of every complete block of a prompt (unsigned)."""
    block_hashes = hash_blocks(tokens, scope.block_size, seeds.block_seed, is_eagle=scope.is_eagle, mm_hashes=mm_hashes)
    return compute_sequence_hashes(block_hashes, chain_seed=seeds.chain_seed)


def draw_unshared_hashes(count: int, random: Random) -> list[int]:
    """Identities for ``assume_kv_reuse=False``: random, so that no two requests share a block."""
    return [random.getrandbits(64) for _ in range(count)]


def _frame(tag: int, value: bytes) -> bytes:
    return bytes((tag,)) + len(value).to_bytes(8, "little") + value


def _optional_frame(tag: int, value: str | None) -> bytes:
    if not value:
        return bytes((tag, 0))
    encoded = value.encode()
    return bytes((tag, 1)) + len(encoded).to_bytes(8, "little") + encoded

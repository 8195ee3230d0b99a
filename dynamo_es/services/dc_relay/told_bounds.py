"""How much a relay tells: no more than readers and the topic take. Pure.

Whatever is left out is counted and told in a warning; the rest of the data centre goes on as if it were all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dynamo_es.services.dc_relay.pools import PoolMembers
from schemas.dc_relay import ModelReadiness, RelayPool
from streams.dc_relay import MAX_MODELS, MAX_POOLS

# Parts of the megabyte that a status may have, and of the half of one that a record of blocks has beside them.
MAX_POOLS_BYTES = 400_000
MAX_MODELS_BYTES = 550_000
MAX_POOL_NAME_BYTES = 8_192
# Numbers of a pool's entry, at most; the heads of an entry's two lists; the head of a text.
_NUMBERS_BYTES = 160
_LISTS_BYTES = 16
_TEXT_BYTES = 5


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What is not told: pools, models of the readiness projection, and names (aliases and adapters) of such models."""

    pools: int = 0
    models: int = 0
    names: int = 0


def bound_pools(found: Mapping[RelayPool, PoolMembers]) -> tuple[dict[RelayPool, PoolMembers], int]:
    """The pools that are told, and how many are not: the first ones by name, if there are too many of them."""
    kept: dict[RelayPool, PoolMembers] = {}
    models: set[str] = set()
    room = MAX_POOLS_BYTES
    for pool in sorted(found, key=_name_of):
        name_bytes = len(msgspec.msgpack.encode(pool))
        entry_bytes = name_bytes + _NUMBERS_BYTES + sum(map(_text_bytes, found[pool].roles))
        too_many = len(kept) == MAX_POOLS or (pool.model not in models and len(models) == MAX_MODELS)
        if too_many or entry_bytes > room or name_bytes > MAX_POOL_NAME_BYTES:
            continue
        room -= entry_bytes
        models.add(pool.model)
        kept[pool] = found[pool]
    return kept, len(found) - len(kept)


def bound_models(models: Sequence[ModelReadiness]) -> tuple[list[ModelReadiness], int, int]:
    """The models that a status names, how many it does not, and how many of their aliases and adapters it does not.

    Readiness of all models comes before the names of any.
    """
    if len(msgspec.msgpack.encode(models)) <= MAX_MODELS_BYTES:
        return list(models), 0, 0
    room = MAX_MODELS_BYTES - _LISTS_BYTES
    kept = []
    for entry in models:
        size = len(msgspec.msgpack.encode(msgspec.structs.replace(entry, aliases=[], adapters=[]))) + _LISTS_BYTES
        if size <= room:
            room -= size
            kept.append(entry)
    told, names = [], 0
    for entry in kept:
        lists = []
        for texts in (entry.aliases, entry.adapters):
            fitting, room = _fitting(texts, room)
            names += len(texts) - len(fitting)
            lists.append(fitting)
        told.append(msgspec.structs.replace(entry, aliases=lists[0], adapters=lists[1]))
    return told, len(models) - len(kept), names


def _fitting(texts: Sequence[str], room: int) -> tuple[list[str], int]:
    found = []
    for text in texts:
        size = _text_bytes(text)
        if size <= room:
            room -= size
            found.append(text)
    return found, room


def _text_bytes(text: str) -> int:
    return len(text.encode()) + _TEXT_BYTES


def _name_of(pool: RelayPool) -> tuple[str, str, int]:
    return pool.path, pool.model, pool.block_size

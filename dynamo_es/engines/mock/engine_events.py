"""KV events as the mimicked engine itself tells them, with its token ids (spec/router-core C.2, C.3). Pure.

vLLM (and TensorRT-LLM, which has no events of its own kind here) sends maps and unsigned hashes, SGLang arrays and
signed ones. Adjacent blocks of a chain are one event, as adjacent removals are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dynamo_es.engines.scheduling.block_manager import Content

_MEDIUM = "GPU"
_GROUP = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
# By this mark consumers know a salt among the extra keys; engines pass it through.
_SALT_MARK = "dynamo-cache-salt:"
# As many blocks an event as an engine's pass has at most.
_MAX_BLOCKS = 1_024
Event = Any


class EngineEvents:
    """Collects what one rank caches, forgets and clears. A ``BlockListener``."""

    def __init__(self, engine_type: str, block_size: int) -> None:
        self._encode: Callable[[dict[str, Any]], Event] = _as_array if engine_type == "sglang" else _as_map
        self._block_size = block_size
        self._events: list[dict[str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._events)

    def stored(self, sequence_hash: int, parent: int | None, content: Content, index: int) -> None:
        last = self._events[-1] if self._events else None
        if last is not None and last["type"] == "BlockStored" and _goes_on(last, parent):
            hashes: list[int] = last["block_hashes"]
            hashes.append(sequence_hash)
            last["token_ids"] += content.block_tokens(index)
            last["extra_keys"].append(None)
            return
        salt = None if parent is not None or content.cache_salt is None else [_SALT_MARK + content.cache_salt]
        self._events.append(
            {
                "type": "BlockStored",
                "block_hashes": [sequence_hash],
                "parent_block_hash": parent,
                "token_ids": list(content.block_tokens(index)),
                "block_size": self._block_size,
                "lora_id": None,
                "medium": _MEDIUM,
                "lora_name": content.lora_name,
                "extra_keys": [salt],
            }
        )

    def removed(self, sequence_hash: int) -> None:
        last = self._events[-1] if self._events else None
        if last is not None and last["type"] == "BlockRemoved" and len(last["block_hashes"]) < _MAX_BLOCKS:
            last["block_hashes"].append(sequence_hash)
        else:
            self._events.append({"type": "BlockRemoved", "block_hashes": [sequence_hash], "medium": _MEDIUM})

    def cleared(self) -> None:
        self._events = [{"type": "AllBlocksCleared"}]

    def drain(self) -> list[Event]:
        """The events since the last call, in the engine's layout."""
        events, self._events = self._events, []
        return [self._encode(event) for event in events]


def encode_batch(timestamp_s: float, events: Sequence[Event], dp_rank: int) -> bytes:
    """A message's payload."""
    return msgspec.msgpack.encode([timestamp_s, events, dp_rank])


def _goes_on(stored: dict[str, Any], parent: int | None) -> bool:
    hashes: list[int] = stored["block_hashes"]
    return parent is not None and hashes[-1] == parent and len(hashes) < _MAX_BLOCKS


def _as_map(event: dict[str, Any]) -> Event:
    return event if event["type"] == "AllBlocksCleared" else event | _GROUP


def _as_array(event: dict[str, Any]) -> Event:
    """Fields in the order in which SGLang declares them; optional ones at the end only as far as they say something."""
    kind = event["type"]
    if kind == "AllBlocksCleared":
        return [kind]
    hashes = [_signed(number) for number in event["block_hashes"]]
    if kind == "BlockRemoved":
        return [kind, hashes, event["medium"]]
    parent = event["parent_block_hash"]
    fields = [
        kind, hashes, None if parent is None else _signed(parent), event["token_ids"], event["block_size"],
        event["lora_id"], event["medium"],
    ]  # fmt: skip
    salted = any(event["extra_keys"])
    if event["lora_name"] is not None or salted:
        fields.append(event["lora_name"])
    if salted:
        fields.append(event["extra_keys"])
    return fields


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number

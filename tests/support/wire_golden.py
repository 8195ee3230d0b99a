"""Cases of golden/router/wire.json: messages as engines send them, and what Dynamo's indexer held after them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dynamo_es.router.hashing import compute_sequence_hashes
from schemas.columns import unpack_u64
from schemas.kv_events import BlocksStored, KvEvents

CASES = json.loads((Path(__file__).parents[1] / "data/golden/router/wire.json").read_text())["cases"]


def needs_sockets(case: dict[str, Any]) -> bool:
    """Whether the case is about frames or replay, and not only about what a batch says."""
    return case["replay_server_frames"] is not None or any("raw_frames" in item for item in case["batches"])


def as_message(value: Any) -> Any:
    if isinstance(value, dict):
        return (
            bytes.fromhex(value["$bytes"]) if set(value) == {"$bytes"} else {k: as_message(v) for k, v in value.items()}
        )
    return [as_message(item) for item in value] if isinstance(value, list) else value


def expected(events: list[dict[str, Any]]) -> dict[tuple[int, str], set[int]]:
    """Sequence hashes by rank and tier that an index dump stands for."""
    found: dict[tuple[int, str], set[int]] = {}
    names: dict[tuple[int, int], int] = {}
    todo = list(events)
    for _ in range(len(todo) ** 2 + 1):
        if not todo:
            break
        event = todo.pop(0)
        rank, stored = event["event"]["dp_rank"], event["event"]["data"]["stored"]
        parent = stored["parent_hash"]
        if parent is not None and (rank, parent) not in names:
            todo.append(event)
            continue
        blocks = stored["blocks"]
        sequences = compute_sequence_hashes(
            [block["tokens_hash"] for block in blocks], None if parent is None else names[rank, parent]
        )
        found.setdefault((rank, event["storage_tier"]), set()).update(sequences)
        names.update({(rank, block["block_hash"]): seq for block, seq in zip(blocks, sequences, strict=True)})
    assert not todo, "the dump names parents that it does not hold"
    return found


def parents_of(records: list[KvEvents]) -> dict[int, int | None]:
    parents: dict[int, int | None] = {}
    for record in records:
        for event in record.events:
            if isinstance(event, BlocksStored):
                sequences = unpack_u64(event.sequence_hashes)
                parents.update(zip(sequences, (event.parent, *sequences), strict=False))
    return parents


def reachable(held: set[int], parents: dict[int, int | None], tier: str) -> set[int]:
    """The reference's device tree prunes what hangs under a removed block; here it stays and counts for nothing."""
    if tier != "device":
        return held
    found: set[int] = set()
    for block in held:
        ancestor: int | None = block
        while ancestor in held:
            ancestor = parents[ancestor]
        if ancestor is None:
            found.add(block)
    return found

"""Rows in which routers and services report load, overlap and index contents (spec: router-core B.7, D.2, D.3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dynamo_es.router.active_sequences import BookedLoad, WorkerRank
from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.router.radix_model import DumpedBlocks
from schemas.kv_events import Tier


def load_row(rank: WorkerRank, load: BookedLoad, new_tokens: int, new_blocks: int) -> dict[str, int]:
    """Load of a rank with a prompt added that would compute ``new_tokens`` and add ``new_blocks``."""
    return {
        "worker_id": rank.worker_id,
        "dp_rank": rank.dp_rank,
        "potential_prefill_tokens": load.prefill_tokens + new_tokens,
        "potential_decode_blocks": load.blocks + new_blocks,
        "active_requests": load.requests,
    }


def overlap_report(
    block_size: int,
    num_blocks: int,
    overlaps: Iterable[tuple[WorkerRank, Sequence[int]]],
    settings: KvRouterSettings,
) -> dict[str, Any]:
    """Overlap of ranks by tier. ``overlaps``: blocks in device memory, then by which host memory and disk extend them.

    There is no shared cache here, so its part says that it is off.
    """
    workers = []
    for rank, (device, host, disk) in sorted(overlaps):
        credit = (
            settings.overlap_score_credit * device
            + settings.host_cache_hit_weight * host
            + settings.disk_cache_hit_weight * disk
        )
        workers.append(
            {
                "worker_id": rank.worker_id,
                "dp_rank": rank.dp_rank,
                "device_blocks": device,
                "host_pinned_blocks": device + host,
                "disk_blocks": device + host + disk,
                "host_pinned_extension_blocks": host,
                "disk_extension_blocks": disk,
                "shared_beyond_device_blocks": None,
                "router_credit_blocks": credit,
            }
        )
    return {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "workers": workers,
        "shared_cache": {"enabled": False, "total_hit_blocks": 0, "ranges": [], "error": None},
    }


def stored_event(event_id: int, tier: Tier, blocks: DumpedBlocks) -> dict[str, Any]:
    """Dumped blocks as a router event; members in Dynamo's order."""
    worker_id, dp_rank = blocks.worker
    return {
        "worker_id": worker_id,
        "storage_tier": tier,
        "residency_domain": "worker",
        "event": {
            "event_id": event_id,
            "data": {
                "stored": {
                    "parent_hash": blocks.parent,
                    "start_position": None,
                    "blocks": [
                        {"block_hash": block, "tokens_hash": tokens, "mm_extra_info": None}
                        for block, tokens in zip(blocks.block_hashes, blocks.tokens_hashes, strict=True)
                    ],
                }
            },
            "dp_rank": dp_rank,
        },
    }


def dump_events(dumped: Iterable[tuple[Tier, DumpedBlocks]]) -> Iterator[dict[str, Any]]:
    """All of an index as router events, numbered from 0."""
    for number, (tier, blocks) in enumerate(dumped):
        yield stored_event(number, tier, blocks)

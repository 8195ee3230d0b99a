"""When the views of a fleet have everything again that happened before a moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

import httpx

from dynamo_es.log.base import EventLog, TopicPartition
from schemas.kv_events import KV_EVENTS
from schemas.registry import REGISTRY
from schemas.requests import REQUESTS
from schemas.worker_load import WORKER_LOAD
from tests.support.pages import Page

FOLDED = (REGISTRY, KV_EVENTS, REQUESTS, WORKER_LOAD)
_LOOK_S = 0.1


async def wait_converged(
    log: EventLog, namespace: str, views: Sequence[str], others: Sequence[str], timeout_s: float
) -> tuple[float, float]:
    """Seconds until what was offered before this call is appended, and until it is in all views.

    ``views``: base URLs of processes that fold (all of ``FOLDED``), ``others``: of those that only append. Load may go
    on meanwhile. Raises ``TimeoutError``.
    """
    begun = time.monotonic()
    async with asyncio.timeout(timeout_s), httpx.AsyncClient(timeout=timeout_s) as http:
        for base in (*views, *others):
            while not _is_appended(await _page(http, base), time.monotonic() - begun):
                await asyncio.sleep(_LOOK_S)
        appended_s = time.monotonic() - begun
        targets = {
            TopicPartition(spec.name, partition): bounds.end
            for spec in FOLDED
            for partition, bounds in (await log.bounds(spec.qualified(namespace))).items()
        }
        for base in views:
            while not _is_folded(await _page(http, base), targets):
                await asyncio.sleep(_LOOK_S)
    return appended_s, time.monotonic() - begun


async def _page(http: httpx.AsyncClient, base: str) -> Page:
    return Page((await http.get(f"{base}/metrics")).text)


def _is_appended(page: Page, since_s: float) -> bool:
    """Whether nothing waits that was offered more than ``since_s`` ago, and the log is well again."""
    oldest_s = page["dynamo_es_log_buffer_oldest_age_seconds"]
    return oldest_s < since_s and page["dynamo_es_log_state", "state=ok"] == 1


def _is_folded(page: Page, targets: Mapping[TopicPartition, int]) -> bool:
    reached = {
        TopicPartition(labels["topic"], int(labels["partition"])): value
        for (name, pairs), value in page.samples.items()
        if name == "dynamo_es_fold_position_offset"
        for labels in [dict(pair.split("=", 1) for pair in pairs)]
    }
    return all(reached.get(place, 0) >= end for place, end in targets.items())

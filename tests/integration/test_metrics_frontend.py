"""What a frontend tells of its log, views, routers and snapshots, on ``/metrics`` and ``/health``."""

from __future__ import annotations

import asyncio
import re

import pytest

from dynamo_es.config.tree import StateConfig
from dynamo_es.log.base import Entry
from dynamo_es.runtime.metrics import MAX_MODELS
from schemas.catalog import TOPICS
from schemas.codec import TopicCodec
from schemas.columns import pack_u64
from schemas.dead_letters import REASONS
from schemas.kv_events import KV_EVENTS, BlocksStored, KvEvents, SourceRetired, key_kv_events
from schemas.registry import REGISTRY
from streams.runner import RunnerStatus
from tests.support.pages import Page
from tests.support.runtimes import wait_for
from tests.support.served_fleet import CHAT, served_fleet

TOPIC = KV_EVENTS.qualified("dynamo")
FAST_SNAPSHOTS = StateConfig(flush_interval_s=0.1, snapshot_interval_s=0.1)


@pytest.fixture
async def fleet():
    async with served_fleet() as fleet:
        yield fleet


async def page_of(fleet) -> Page:
    reply = await fleet.get("/metrics")
    assert reply.status == 200
    return Page(reply.text)


def batch(seq, *blocks, model="m", worker=1, incarnation=5, tier="device", reset=False):
    column = pack_u64(blocks)
    events = [BlocksStored(tier, None, column, column)] if blocks else []
    return KvEvents(1, model, worker, 0, incarnation, seq, 16, reset, events)


async def append(fleet, value):
    """Appended and folded by the frontend."""
    codec = TopicCodec(KV_EVENTS)
    key = key_kv_events(value.model, value.worker_id, value.dp_rank)
    position = await fleet.log.append(TOPIC, Entry(codec.encode(value), key, codec.headers))
    await fleet.views.kv_index.wait_applied(position, 5)


async def test_EVT_01_trust_gaps_duplicates_stragglers_are_counted(fleet):
    await append(fleet, batch(0, 11, 12))
    await append(fleet, batch(0, 11, 12))
    await append(fleet, batch(1, 13, tier="disk"))
    await append(fleet, batch(0, 21, worker=2))
    page = await page_of(fleet)
    assert page["dynamo_es_index_sources", "trust=exact"] == 2
    assert page["dynamo_es_index_blocks", "model=m", "tier=device"] == 3
    assert page["dynamo_es_index_blocks", "model=m", "tier=disk"] == 1
    assert page["dynamo_es_index_entries", "model=m", "tier=device"] == 3
    assert page["dynamo_es_index_bytes", "model=m", "tier=device"] > 0
    await append(fleet, batch(4, 14))
    await append(fleet, batch(0, 31, incarnation=6, worker=2))
    await append(fleet, batch(1, 32, incarnation=5, worker=2))
    await append(fleet, KvEvents(1, "m", 3, 0, 1, 0, 16, False, []))
    await append(fleet, KvEvents(1, "m", 3, 0, 1, 1, 16, False, [SourceRetired("gone")]))
    page = await page_of(fleet)
    assert {trust: page["dynamo_es_index_sources", f"trust={trust}"] for trust in ("exact", "degraded", "retired")} == {
        "exact": 1, "degraded": 1, "retired": 1,
    }  # fmt: skip
    results = {
        result: page["dynamo_es_index_batches_total", f"result={result}"]
        for result in ("seen", "duplicate", "straggler", "gap", "skipped-degraded")
    }
    assert results == {"seen": 8, "duplicate": 1, "straggler": 1, "gap": 1, "skipped-degraded": 1}
    assert page["dynamo_es_index_missing_batches_total"] == 2


async def test_lag_and_rate_by_fold_and_partition(fleet):
    await append(fleet, batch(0, 1, 2, 3))
    await fleet.core.progress.look()
    await wait_for(lambda: fleet.views.kv_index.status is RunnerStatus.LIVE)
    page = await page_of(fleet)
    lags = page.labels_of("dynamo_es_fold_lag_records")
    kv = [labels for labels in lags if "fold=kv-index" in labels]
    assert {label for labels in kv for label in labels if label.startswith("partition=")} == {
        f"partition={number}" for number in range(KV_EVENTS.partitions)
    }
    assert all("topic=kv-events" in labels for labels in kv)
    assert {label for labels in lags for label in labels if label.startswith("fold=")} == {
        "fold=registry", "fold=kv-index", "fold=requests", "fold=worker-load",
    }  # fmt: skip
    assert sum(page[("dynamo_es_fold_lag_records", *labels)] for labels in kv) == 0
    assert sum(page[("dynamo_es_fold_position_offset", *labels)] for labels in kv) == 1
    assert page["dynamo_es_fold_records_total", "fold=kv-index"] == 1
    assert page["dynamo_es_fold_state", "fold=kv-index", "state=live"] == 1
    assert page["dynamo_es_fold_progress_ratio", "fold=kv-index"] == 1
    assert page["dynamo_es_fold_stalled_partitions", "fold=kv-index"] == 0
    await wait_for(lambda: fleet.views.kv_index.counters.commits)
    page = await page_of(fleet)
    assert page["dynamo_es_fold_commits_total", "fold=kv-index"] >= 1
    assert page["dynamo_es_fold_failed_commits_total", "fold=kv-index"] == 0
    assert page["dynamo_es_fold_rebuilds_total", "fold=kv-index"] == 0


async def test_dead_letters_by_topic_and_reason(fleet):
    codec = TopicCodec(KV_EVENTS)
    newer = batch(0, 1)
    newer.version = 9
    for value in (b"\xc1garbage", b"\xc1more", codec.encode(newer)):
        position = await fleet.log.append(TOPIC, Entry(value, b"k", ()))
        await fleet.views.kv_index.wait_applied(position, 5)
    position = await fleet.log.append(REGISTRY.qualified("dynamo"), Entry(b"\x00", b"k", ()))
    await fleet.core.registry.wait_applied(position, 5)
    page = await page_of(fleet)
    assert page["dynamo_es_dead_letters_total", "topic=kv-events", "reason=undecodable"] == 2
    assert page["dynamo_es_dead_letters_total", "topic=kv-events", "reason=unknown_version"] == 1
    name = "dynamo_es_dead_letters_total"
    registry = [page[(name, *labels)] for labels in page.labels_of(name) if "topic=registry" in labels]
    assert sorted(registry) == [0, 0, 0, 0, 1]
    assert len(page.labels_of(name)) == (len(TOPICS) + 1) * len(REASONS)
    assert page["dynamo_es_fold_refused_records_total", "fold=kv-index"] == 3


async def test_bookings_registry_lease_and_buffer(fleet):
    page = await page_of(fleet)
    assert page["dynamo_es_registry_instances", "state=serving"] == 0
    await fleet.mock_worker()
    assert (await fleet.ask(CHAT, max_tokens=2)).status == 200
    await fleet.finished()
    await wait_for(lambda: not fleet.views.requests.state.bookings and fleet.views.requests.state.counters.finished)
    page = await page_of(fleet)
    assert page["dynamo_es_open_bookings"] == 0
    assert page["dynamo_es_booking_events_total", "result=routed"] == 1
    assert page["dynamo_es_booking_events_total", "result=finished"] == 1
    assert page["dynamo_es_registry_instances", "state=serving"] == 1
    assert page["dynamo_es_registry_entries", "kind=lease"] == 2
    assert page["dynamo_es_registry_leases", "role=frontend"] == page["dynamo_es_registry_leases", "role=worker"] == 1
    assert page["dynamo_es_registry_entries", "kind=model"] == 1
    assert page["dynamo_frontend_model_ready", "model=m"] == 1
    assert page["dynamo_es_lease_lost_total"] == page["dynamo_es_lease_failed_renewals_total"] == 0
    assert page["dynamo_es_log_buffer_records"] == page["dynamo_es_log_buffer_bytes"] == 0
    assert page["dynamo_es_log_buffer_limit_records"] == 100_000
    assert page["dynamo_es_log_buffer_appended_total"] >= 2
    assert page["dynamo_es_log_buffer_dropped_total", "cause=full"] == 0
    assert page["dynamo_es_events_total", "topic=requests", "result=taken"] >= 2
    assert page["dynamo_component_uptime_seconds"] > 0
    (decided,) = page.labels_of("dynamo_es_routing_decisions_total")
    assert page[("dynamo_es_routing_decisions_total", *decided)] == 1
    assert "model=m" in decided


async def test_lost_lease_and_failed_renewals(fleet):
    fleet.frontend_log.read_only = True
    await wait_for(lambda: fleet.core.registration.failed_renewals)
    page = await page_of(fleet)
    assert page["dynamo_es_lease_failed_renewals_total"] >= 1
    assert page["dynamo_es_log_state", "state=degraded"] == 1
    assert page["dynamo_es_log_state", "state=ok"] == 0


async def test_snapshot_age_offset_and_what_is_not_covered():
    async with served_fleet(state=FAST_SNAPSHOTS) as fleet:
        counters = fleet.views.snapshots.counters
        await append(fleet, batch(0, *range(1, 50)))
        await wait_for(lambda: counters.written == KV_EVENTS.partitions)
        await wait_for(lambda: sum(offset for offset, _ in counters.covered.values()) == 1)
        (used,) = [partition for partition, (offset, _) in counters.covered.items() if offset]
        page = await page_of(fleet)
        labels = page.labels_of("dynamo_es_snapshot_age_seconds")
        assert labels == [frozenset({f"partition={number}"}) for number in range(KV_EVENTS.partitions)]
        assert page["dynamo_es_snapshot_covered_offset", f"partition={used}"] == 1
        assert page["dynamo_es_snapshot_uncovered_records", f"partition={used}"] == 0
        assert page["dynamo_es_snapshots_total", "result=written"] == KV_EVENTS.partitions
        body = (await fleet.get("/health")).json()["snapshots"]
        assert body["written"] == KV_EVENTS.partitions
        assert body["partitions"][str(used)]["covered_offset"] == 1
        # An idle partition has nothing more to cover: its snapshot does not age, and is not written again.
        before = counters.covered[used][1]
        await wait_for(lambda: counters.covered[used][1] > before)
        assert counters.written == KV_EVENTS.partitions


async def test_OPS_03_made_up_models_and_paths_do_not_make_the_page_grow(fleet):
    await fleet.mock_worker()
    await fleet.ask(CHAT, max_tokens=1)
    for number in range(MAX_MODELS + 40):
        await append(fleet, batch(0, number + 1, model=f"made-up-{number}"))
    await fleet.ask(CHAT, model="no-such")
    await fleet.get("/nowhere")
    first = await page_of(fleet)
    for number in range(50):
        await fleet.ask(CHAT, model=f"random-{number}")
        await fleet.get(f"/nowhere/{number}")
        await append(fleet, batch(0, number + 1, model=f"more-{number}"))
    second = await page_of(fleet)
    names = {label for labels in second.labels_of("dynamo_es_index_blocks") for label in labels}
    assert len([name for name in names if name.startswith("model=")]) == MAX_MODELS + 1
    assert second["dynamo_es_metric_label_overflows_total", "label=index_model"] > 0
    # 103 were made up at first, 64 labels less the mock worker's own: the rest and the 50 new ones are one value.
    assert second["dynamo_es_index_blocks", "model=other", "tier=device"] >= 90
    grown = second.samples.keys() - first.samples.keys()
    assert not grown, grown


async def test_every_metric_has_a_help_text_a_unit_and_a_name_of_the_house(fleet):
    await fleet.mock_worker()
    await fleet.ask(CHAT, max_tokens=1)
    page = await page_of(fleet)
    units = ("_seconds", "_records", "_bytes", "_offset", "_ratio", "_blocks", "_tokens", "_requests", "_partitions")
    things = (
        "_state",
        "_sources",
        "_entries",
        "_leases",
        "_instances",
        "_workers",
        "_info",
        "_bookings",
        "_streams",
        "_sessions",
    )
    for name, family in page.families.items():
        assert family.documentation, name
        if name.startswith("dynamo_es_") and family.type == "gauge":
            assert name.endswith((*units, *things)), name
        assert re.fullmatch(r"(dynamo_(es|frontend|component)|process|python)_[a-z0-9_]+", name), name


class StuckLog:
    """A log whose readers of ``kv-events`` get nothing while ``stuck`` is set, although it says that there is more."""

    def __init__(self, log):
        self._log = log
        self.stuck = False

    def __getattr__(self, name):
        return getattr(self._log, name)

    def reader(self, positions):
        reader = self._log.reader(positions)
        return StuckReader(self, reader) if any(place.topic == TOPIC for place in positions) else reader


class StuckReader:
    def __init__(self, log, reader):
        self._log, self._reader = log, reader

    def __getattr__(self, name):
        return getattr(self._reader, name)

    async def poll(self, *, max_records=10_000, timeout_s=None):
        if self._log.stuck:
            await asyncio.sleep(0.01)
            return {}
        return await self._reader.poll(max_records=max_records, timeout_s=min(0.05, timeout_s or 0.05))


async def test_EVT_14_a_view_that_stands_still_makes_the_frontend_not_ready_and_comes_back():
    state = StateConfig(flush_interval_s=0.2, stall_timeout_s=0.3)
    async with served_fleet(StuckLog, state) as fleet:
        await append(fleet, batch(0, 1))
        assert (await fleet.get("/health")).status == 200
        fleet.log.stuck = True
        await asyncio.sleep(0.06)  # A poll that is under way ends.
        codec = TopicCodec(KV_EVENTS)
        entry = Entry(codec.encode(batch(1, 2)), key_kv_events("m", 1, 0), codec.headers)
        position = await fleet.log.append(TOPIC, entry)
        await wait_for(fleet.core.progress.stalls)
        reply = await fleet.get("/health")
        assert (reply.status, reply.json()["status"], reply.json()["stage"]) == (503, "not_ready", "stalled")
        (stalled,) = reply.json()["stalled"]
        assert (stalled["topic"], stalled["partition"], stalled["offset"]) == (TOPIC, position.partition, 1)
        assert stalled["lag_records"] == 1
        assert f"{TOPIC}[{position.partition}]@1" in reply.json()["message"]
        page = await page_of(fleet)
        assert page["dynamo_es_fold_stalled_partitions", "fold=kv-index"] == 1
        assert (await fleet.get("/live")).status == 200
        fleet.log.stuck = False
        await fleet.views.kv_index.wait_applied(position, 5)
        await wait_for(lambda: not fleet.core.progress.stalls())
        assert (await fleet.get("/health")).status == 200


async def test_EVT_15_an_idle_frontend_stays_ready():
    async with served_fleet(StuckLog, StateConfig(flush_interval_s=0.2, stall_timeout_s=0.05)) as fleet:
        await append(fleet, batch(0, 1))
        fleet.log.stuck = True
        looks = 0
        while looks < 20:
            await fleet.core.progress.look()
            looks += 1
            await asyncio.sleep(0.01)
            assert [stall for stall in fleet.core.progress.stalls() if stall.fold == "kv-index"] == []

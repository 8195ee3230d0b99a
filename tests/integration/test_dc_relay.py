"""Relays of data centres and the view over them: prompts find their blocks, whatever fails in between."""

from __future__ import annotations

import asyncio
import random

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from dynamo_es.clock import SystemClock
from dynamo_es.config.tree import StateConfig
from dynamo_es.log.base import Entry, TopicPartition
from dynamo_es.log.errors import LogUnavailable
from dynamo_es.log.memory import MemoryLog
from dynamo_es.router.hashing import hash_prompt
from dynamo_es.services.dc_relay import relay as relay_module
from dynamo_es.services.dc_relay import told_bounds
from dynamo_es.services.dc_relay.global_view import GlobalKvView, RelaySource
from dynamo_es.services.dc_relay.metrics import RelayCollector
from dynamo_es.services.dc_relay.ranking import PromptQuery
from dynamo_es.services.dc_relay.relay import DcRelay
from dynamo_es.services.dc_relay.settings import RelaySettings
from schemas.codec import TopicCodec
from schemas.columns import pack_u64
from schemas.dc_relay import DC_RELAY, DcStatus
from schemas.kv_events import KV_EVENTS, BlocksStored, KvEvents, key_kv_events
from streams.dc_relay import DcRelayFold, contents_digest
from tests.support.relay_sites import BLOCK, ENDPOINT, Site, shared, site
from tests.support.runtimes import PATIENT, make_runtime, wait_for

PROMPT = list(range(100, 132))
OTHER = list(range(500, 532))
TOPIC = DC_RELAY.qualified("dynamo")
# Nothing is told before a test says so.
HOUR_MS = 3_600_000


@pytest.fixture
async def east():
    async with site("east") as made:
        yield made


@pytest.fixture
async def west():
    async with site("west") as made:
        yield made


@pytest.fixture
async def view(east: Site, west: Site):
    made = view_of(east, west)
    yield made
    await made.close()


def view_of(*sites: Site, stale_after_s: float = 600.0) -> GlobalKvView:
    sources = [RelaySource(shared(each.log), "dynamo") for each in sites]
    return GlobalKvView(sources, clock=SystemClock(), rng=random.Random(1), stale_after_s=stale_after_s)


def matches(view: GlobalKvView, tokens: list[int], model: str = "m") -> list[tuple[str, int]]:
    return [(each.dc_id, each.matched_blocks) for each in view.find(PromptQuery(model, tokens))]


async def fold_of(each: Site) -> str:
    """What a reader makes of the topic that reads it now, from its start."""
    view = view_of(each)
    await view.start(60)
    digest = contents_digest(view.states[0], each.dc_id)
    await view.close()
    return digest


async def test_a_prompt_finds_the_data_centre_that_holds_most_of_it(east: Site, west: Site, view) -> None:
    await view.start(0.05)
    for each in (east, west):
        await each.relay()
    in_east, in_west, again_east = await east.worker(), await west.worker(), await east.worker()
    in_east.store(PROMPT[:16])
    again_east.store(OTHER)
    in_west.store(PROMPT)
    await wait_for(lambda: matches(view, PROMPT) == [("west", 8), ("east", 4)])
    await wait_for(lambda: matches(view, OTHER) == [("east", 8), ("west", 0)])
    assert matches(view, PROMPT, "unknown") == []

    # Of two that hold as much, the one that is used less.
    in_east.store(PROMPT)
    await in_west.tell_load(90)
    await in_east.tell_load(10)
    await again_east.tell_load(30, waiting=2)

    def best():
        return view.find(PromptQuery("m", PROMPT))[0]

    await wait_for(lambda: (best().dc_id, best().busy) == ("east", 0.2))
    told = best().to_json()
    assert told["load"]["waiting"] == {"total": 2, "ranks": 2}
    assert told["load"]["active_decode_blocks"] is None
    assert (told["ranks"], told["blocks"], told["roles"], told["ready"]) == (2, 16, ["aggregated"], True)

    # A worker that leaves takes what only it held; the last one takes the pool along.
    await in_east.leave()
    await wait_for(lambda: matches(view, PROMPT) == [("west", 8), ("east", 0)])
    await again_east.leave()
    await wait_for(lambda: matches(view, PROMPT) == [("west", 8)])


async def test_a_relay_that_is_killed_and_started_anew_tells_the_same(east: Site) -> None:
    worker = await east.worker()
    relay = await east.relay()
    for start in range(0, 400, 40):
        worker.store(list(range(start, start + 40)))
    await wait_for(lambda: list(relay.pools().values()) == [100])
    before = await fold_of(east)
    await kill(relay)
    again = await east.relay()
    await again.flush()
    assert await fold_of(east) == before
    worker.store(PROMPT)
    await wait_for(lambda: list(again.pools().values()) == [108])
    assert await fold_of(east) != before
    view = view_of(east)
    await view.start(60)
    assert matches(view, PROMPT) == [("east", 8)]
    await view.close()


async def kill(relay: DcRelay) -> None:
    """Amid its work: nothing is taken back, nothing is told any more."""
    for task in relay._tasks:
        task.cancel()
    await asyncio.gather(*relay._tasks, return_exceptions=True)


@pytest.mark.parametrize("seed", range(3))
async def test_relays_that_are_killed_at_any_instant_leave_readers_with_the_truth(east: Site, seed: int) -> None:
    rng = random.Random(seed)
    view = view_of(east)
    workers = [await east.worker(), await east.worker()]
    await view.start(0.05)
    truth: list[dict[int, int]] = [{}, {}]
    for _ in range(5):
        relay = await east.relay()
        for _ in range(rng.randint(1, 60)):
            number = rng.randrange(2)
            held, token = truth[number], rng.randrange(40)
            if token in held:
                workers[number].publisher.publish_removed([held.pop(token)])
            else:
                (held[token],) = workers[number].store([token] * BLOCK)
            if rng.random() < 0.3:
                await asyncio.sleep(rng.choice([0, 0, 0.001, 0.003]))
        await kill(relay)
    last = await east.relay()
    expected = {hash_prompt([token] * BLOCK, BLOCK)[1][0] for held in truth for token in held}

    def read() -> list[set[int]]:
        (state,) = view.states
        return [set(state.blocks_of(pool).tolist()) for pool in state.pools()]

    await wait_for(lambda: read() == [expected] and list(last.pools().values()) == [len(expected)])
    (state,) = view.states
    assert state.counters.gaps == 0
    await view.close()


async def test_changes_wait_for_the_threshold_or_the_delay(east: Site) -> None:
    worker = await east.worker()
    # All that is to be in the registry is there before the relay looks: a change in it is told at once.
    await wait_for(lambda: worker.runtime.core.registry.state.instances)
    relay = await east.relay(publication_threshold=8, publication_delay_ms=HOUR_MS, load_window_ms=20)
    async with asyncio.timeout(60):
        while not relay.pools():
            await relay.flush()
            await asyncio.sleep(0.01)
    (pool,) = relay.pools()
    worker.store(PROMPT[: 2 * BLOCK])
    await wait_for(lambda: relay._changes.blocks == 2)
    statuses = relay.counts.statuses
    await wait_for(lambda: relay.counts.statuses > statuses + 2)
    assert relay.pools() == {pool: 0}
    worker.store(OTHER[: 6 * BLOCK])
    await wait_for(lambda: relay.pools() == {pool: 8})
    worker.store(PROMPT[: 3 * BLOCK])
    await wait_for(lambda: relay._changes.blocks)
    assert relay.pools() == {pool: 8}
    await relay.flush()
    assert relay.pools() == {pool: 9}
    assert relay.counts.deltas == 2


async def test_with_a_short_delay_a_single_block_is_told(east: Site) -> None:
    relay = await east.relay(publication_threshold=10_000, publication_delay_ms=20)
    worker = await east.worker()
    worker.store(PROMPT[:BLOCK])
    await wait_for(lambda: list(relay.pools().values()) == [1])


async def test_snapshots_come_again_for_late_readers(east: Site) -> None:
    relay = await east.relay(load_window_ms=10, snapshot_interval_s=0.05)
    worker = await east.worker()
    worker.store(PROMPT)
    await wait_for(lambda: list(relay.pools().values()) == [8])
    before = relay.counts.snapshots
    await wait_for(lambda: relay.counts.snapshots > before + 2)


async def test_metrics_tell_what_was_told(east: Site) -> None:
    relay = await east.relay(load_window_ms=20)
    worker = await east.worker()
    worker.store(PROMPT)
    await wait_for(lambda: list(relay.pools().values()) == [8])
    registry = CollectorRegistry()
    registry.register(RelayCollector(relay))
    page = generate_latest(registry).decode()
    for line in (
        'dynamo_es_relay_endpoints{state="watched"} 1.0',
        'dynamo_es_relay_endpoints{state="active"} 1.0',
        'dynamo_es_relay_endpoints{state="fenced"} 0.0',
        "dynamo_es_relay_blocks 8.0",
        "dynamo_es_relay_lives_total 1.0",
        "dynamo_es_relay_healthy 1.0",
    ):
        assert line in page


async def test_a_data_centre_with_more_models_than_readers_take_is_told_as_far_as_they_do(
    east: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("streams.dc_relay", told_bounds.__name__):
        monkeypatch.setattr(f"{module}.MAX_MODELS", 2)
    for model in ("a", "b", "c"):
        worker = await east.worker(model=model, endpoint=f"ns.{model}.generate")
        worker.store(PROMPT)
    relay = await east.relay(load_window_ms=20)
    await wait_for(lambda: {pool.model: count for pool, count in relay.pools().items()} == {"a": 8, "b": 8})
    statuses = relay.counts.statuses
    await wait_for(lambda: relay.left_out.pools == 1 and relay.counts.statuses > statuses + 2)
    assert relay.health()["healthy"]
    assert (relay.counts.lives, relay.counts.failures) == (1, 0)
    registry = CollectorRegistry()
    registry.register(RelayCollector(relay))
    assert 'dynamo_es_relay_left_out{kind="pools"} 1.0' in generate_latest(registry).decode()


async def append(east: Site, worker_id: int, seq: int, *hashes: int, reset: bool = False) -> None:
    column = pack_u64(hashes)
    batch = KvEvents(1, "m", worker_id, 0, 1, seq, BLOCK, reset, [BlocksStored("device", None, column, column)])
    runtime = east.runtime()
    await runtime.core.start()
    await runtime.core.appender.append(KV_EVENTS, key_kv_events("m", worker_id, 0), batch)


async def test_a_source_that_cannot_be_repaired_is_fenced_until_it_is(
    east: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "GRACE_S", 0.05)
    relay = await east.relay(recovery_attempt_timeout_ms=50, load_window_ms=20)
    # It has no publisher: nobody answers.
    worker = await east.worker(events=False)
    number = worker.runtime.core.instance_id
    await append(east, number, 0, 1, 2, reset=True)
    await wait_for(lambda: list(relay.pools().values()) == [2])
    await append(east, number, 2, 3)
    await wait_for(lambda: relay.health()["fenced_endpoint_count"] == 1)
    health = relay.health()
    assert (health["endpoint_count"], health["active_endpoint_count"], health["healthy"]) == (1, 0, True)
    await wait_for(lambda: relay.pools() == {})
    await append(east, number, 3, 1, 2, 3, reset=True)
    await wait_for(lambda: list(relay.pools().values()) == [3])
    assert relay.health()["fenced_endpoint_count"] == 0


async def test_a_source_with_a_gap_is_asked_and_is_back_when_it_announced_itself_anew(
    east: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamo_es.router.resync.GRACE_S", 0.05)
    relay = await east.relay()
    worker = await east.worker()
    worker.store(PROMPT)
    await wait_for(lambda: list(relay.pools().values()) == [8])
    (source,) = relay._index.state.sources.values()
    await append_gap(east, worker.runtime.core.instance_id, source.incarnation, source.next_seq + 5)
    await wait_for(lambda: not relay.pools())
    await wait_for(lambda: list(relay.pools().values()) == [8])
    assert relay.health()["fenced_endpoint_count"] == 0


async def append_gap(east: Site, worker_id: int, incarnation: int, seq: int) -> None:
    runtime = east.runtime()
    await runtime.core.start()
    batch = KvEvents(1, "m", worker_id, 0, incarnation, seq, BLOCK, False, [])
    await runtime.core.appender.append(KV_EVENTS, key_kv_events("m", worker_id, 0), batch)


class SlowLog(MemoryLog):
    """Gives no KV events to who reads it while told to hold them back."""

    held = False

    def reader(self, start):
        return SlowReader(self, super().reader(start), any(place.topic.endswith("kv-events") for place in start))


class SlowReader:
    def __init__(self, log: SlowLog, reader, concerned: bool) -> None:
        self._log, self._reader, self._concerned = log, reader, concerned

    async def poll(self, **options):
        while self._concerned and self._log.held:
            await asyncio.sleep(0.01)
        return await self._reader.poll(**options)

    def __getattr__(self, name: str):
        return getattr(self._reader, name)


async def test_a_relay_that_is_not_caught_up_at_its_start_tells_nothing_until_it_is() -> None:
    async with site("north", SlowLog("north", SystemClock(), random.Random(1))) as north:
        worker = await north.worker()
        worker.store(PROMPT)
        before = await north.relay()
        await wait_for(lambda: list(before.pools().values()) == [8])
        view = view_of(north)
        await view.start(60)
        await before.close()
        assert matches(view, PROMPT) == [("north", 8)]

        async def end() -> int:
            return sum(each.end for each in (await north.log.bounds(TOPIC)).values())

        told = await end()
        north.log.held = True
        runtime = make_runtime(north.log, runtime=PATIENT, state=StateConfig(catch_up_timeout_s=0.05))
        relay = DcRelay(runtime.core, RelaySettings("north", load_window_ms=20))
        await relay.start()
        await wait_for(lambda: relay.health()["host_last_error"])
        assert not relay.health()["healthy"]
        assert "kv-index is not caught up" in relay.health()["host_last_error"]
        with pytest.raises(LogUnavailable, match="not caught up"):
            await relay.flush()
        assert await end() == told
        north.log.held = False
        await wait_for(lambda: list(relay.pools().values()) == [8])
        await wait_for(lambda: relay.health()["healthy"])
        await view.wait_caught_up(60)
        assert matches(view, PROMPT) == [("north", 8)]
        assert view.states[0].counters.gaps == 0
        await view.close()
        await runtime.close()


class FailingLog(MemoryLog):
    """Refuses appends to ``dc-relay`` while told to."""

    failing = False

    async def append_all(self, topic, entries):
        if self.failing and topic == TOPIC:
            raise LogUnavailable("the broker is away")
        return await super().append_all(topic, entries)


async def test_a_relay_whose_appends_fail_says_so_and_tells_everything_once_they_do_not() -> None:
    async with site("north", FailingLog("north", SystemClock(), random.Random(1))) as north:
        relay = await north.relay(load_window_ms=20)
        worker = await north.worker()
        worker.store(PROMPT)
        await wait_for(lambda: list(relay.pools().values()) == [8])
        north.log.failing = True
        worker.store(OTHER)
        await wait_for(lambda: not relay.health()["healthy"])
        assert relay.health()["host_last_error"] == "the broker is away"
        with pytest.raises(LogUnavailable):
            await relay.flush()
        north.log.failing = False
        await wait_for(lambda: relay.health()["healthy"] and list(relay.pools().values()) == [16])
        assert relay.counts.lives > 1
        view = view_of(north)
        await view.start(60)
        assert matches(view, OTHER) == [("north", 8)]
        await view.close()


async def test_a_data_centre_that_is_silent_is_ranked_last(east: Site, west: Site) -> None:
    view = view_of(east, west, stale_after_s=0.5)
    in_east, in_west = await east.worker(), await west.worker()
    in_east.store(PROMPT)
    in_west.store(PROMPT[:BLOCK])
    silent, talking = await east.relay(load_window_ms=50), await west.relay(load_window_ms=50)
    await wait_for(lambda: (list(silent.pools().values()), list(talking.pools().values())) == ([8], [1]))
    await view.start(60)
    await silent.close()
    await wait_for(lambda: matches(view, PROMPT) == [("west", 1), ("east", 8)])
    assert [each.stale for each in view.find(PromptQuery("m", PROMPT))] == [False, True]
    assert {entry["dc_id"]: entry["stale"] for entry in view.data_centres()} == {"east": True, "west": False}
    await view.close()


async def test_a_topic_that_is_not_there_is_waited_for(east: Site) -> None:
    view = view_of(east)
    await view.start(0.05)
    assert view.states == []
    (entry,) = view.topics()
    assert entry["state"] == "unreadable"
    assert "does not exist" in entry["reason"]
    worker = await east.worker()
    worker.store(PROMPT)
    await east.relay()
    await wait_for(lambda: matches(view, PROMPT) == [("east", 8)])
    assert view.topics()[0]["reason"] == ""
    await view.close()


async def test_what_is_not_a_record_of_the_topic_is_counted_and_passed_over(east: Site) -> None:
    worker = await east.worker()
    worker.store(PROMPT)
    relay = await east.relay()
    await wait_for(lambda: list(relay.pools().values()) == [8])
    for partition in range(DC_RELAY.partitions):
        await east.log.append(TOPIC, Entry(b"\xc1", b"east", (), None, partition))
    view = view_of(east)
    await view.start(60)
    assert matches(view, PROMPT) == [("east", 8)]
    assert view.topics()[0]["refused_records"] == DC_RELAY.partitions
    await view.close()


async def test_all_records_of_a_data_centre_are_in_one_partition_and_numbered_without_a_hole(east: Site) -> None:
    worker = await east.worker(endpoint=ENDPOINT)
    relay = await east.relay()
    for start in range(0, 200, 8):
        worker.store(list(range(start, start + 8)))
        await relay.flush()
    bounds = {number: each for number, each in (await east.log.bounds(TOPIC)).items() if each.end}
    ((partition, limits),) = bounds.items()
    place = TopicPartition(TOPIC, partition)
    reader = east.log.reader({place: limits.start})
    records = (await reader.poll(max_records=100_000, timeout_s=1))[place]
    await reader.close()
    codec = TopicCodec(DC_RELAY)
    values = [codec.decode(record.value, record.headers) for record in records]
    assert [value.seq for value in values] == list(range(len(values)))
    assert isinstance(values[0], DcStatus)
    assert {record.key for record in records} == {b"east"}
    assert DcRelayFold.topics == (DC_RELAY,)

"""Workers of the stream processors as processes, on a real Kafka: joining, leaving, dying."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time

import pytest
from prometheus_client import CollectorRegistry

from dynamo_es.cli.streams import work
from dynamo_es.clock import SystemClock
from dynamo_es.config.tree import LogConfig, StateConfig, StreamsConfig, SystemConfig
from dynamo_es.store.rocks import RocksStore
from schemas.forward_pass import FORWARD_PASS
from streams.faust_app import build_app
from streams.rank_load import PassLoadFold
from streams.stream_worker import StreamsSettings
from tests.support.stream_fleet import DEADLINE_S, PARTITIONS, SESSION_S, SNAPSHOT_S, WINDOW_S, StreamFleet

pytestmark = [pytest.mark.kafka, pytest.mark.crash]


@pytest.fixture
async def make_fleet(open_kafka, tmp_path):
    async with contextlib.AsyncExitStack() as stack:

        async def make(bootstrap, options="") -> StreamFleet:
            fleet = StreamFleet(await open_kafka(bootstrap, options), f"kafka://{bootstrap}{options}", tmp_path)
            stack.push_async_callback(fleet.close)
            await fleet.start()
            return fleet

        yield make


@pytest.fixture
async def fleet(make_fleet, kafka_bootstrap):
    return await make_fleet(kafka_bootstrap)


async def test_nothing_is_lost_or_counted_twice_when_workers_join_leave_and_die(fleet, capsys):
    """EVT-13: workers with folders of their own; the second joins, leaves, comes back with its old state, is killed."""
    await fleet.append(1500)
    async with fleet.events():
        first = await fleet.worker("a")
        await fleet.until(lambda: len(first.live()) == PARTITIONS, "the first worker has everything")
        second = await fleet.worker("b")
        joined_s = await fleet.until(lambda: len(second.live()) >= PARTITIONS // 3, "the second has its share")
        moved = fleet.snapshots_of(second)
        assert moved
        await asyncio.sleep(SNAPSHOT_S)

        before = await fleet.manifests()
        left_at = time.monotonic()
        await second.leave()
        left_s = time.monotonic() - left_at
        gap_s = await fleet.until(
            lambda: fleet.are_newer(before, moved, first), "snapshots of what the second had, by the first", 30
        )

        third = await fleet.worker("b")
        await fleet.until(lambda: len(third.live()) >= PARTITIONS // 3, "back with its old state")
        await asyncio.sleep(1.0)
        third.ends = True
        third.process.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        await third.process.wait()
        lost = len(third.live())
        opened = first.messages().count("live at")
        await fleet.until(lambda: first.messages().count("live at") >= opened + lost // 2, "the first took over")
        taken_s = time.monotonic() - killed_at
        await asyncio.sleep(1.0)
    covered_s = await fleet.until(fleet.is_covered, "windows cover everything")
    windows = await fleet.check_windows()
    await first.leave()
    await fleet.check_snapshots()
    assert windows > 100
    with capsys.disabled():
        print(
            f"\njoin {joined_s:.1f} s, clean leave {left_s:.1f} s, snapshot gap after it {gap_s:.1f} s, "
            f"take-over after SIGKILL {taken_s:.1f} s (session timeout {SESSION_S} s), covered {covered_s:.1f} s after "
            f"the last event; {windows} windows equal"
        )


async def test_workers_that_share_a_folder_hand_partitions_over_by_lock(fleet):
    """EVT-09: one store is held by a process that is no worker; its partition waits, the others do not.

    The second worker is the plain ``faust`` command, with its options from the environment.
    """
    await fleet.append(400)
    folder = fleet.folder / "shared"
    place = f"{FORWARD_PASS.qualified(fleet.namespace)}[1]"
    held = folder / f"{FORWARD_PASS.qualified(fleet.namespace)}-1"
    store = await asyncio.to_thread(RocksStore, held, PassLoadFold.families)
    try:
        first = await fleet.worker("shared", DYN_ES_STREAMS_LOCK_TIMEOUT="1")
        await fleet.until(lambda: len(first.live()) == PARTITIONS - 1, "everything but the one")
        assert place not in first.live()
        await fleet.until(lambda: f"{place} is given up by this worker" in first.messages(), "it is given up")
        assert first.process.returncode is None
    finally:
        await asyncio.to_thread(store.close)
    second = await fleet.worker("shared", "-m", "faust", "-A", "streams.faust_app", "worker", "-l", "info")
    async with fleet.events():
        await fleet.until(lambda: len(second.live()) >= PARTITIONS // 3, "stores changed hands")
        await asyncio.sleep(0.5)
    await second.leave()
    await fleet.until(fleet.is_covered, "windows cover everything, the partition that was given up included")
    assert await fleet.check_windows() > 20
    await first.leave()
    await fleet.check_snapshots()


async def test_a_worker_goes_on_after_a_broker_was_away(own_broker, make_fleet):
    """EVT-14: the broker dies and comes back; partitions get on without anybody's help."""
    fleet = await make_fleet(own_broker.bootstrap, "?request_timeout_ms=2000&connect_timeout_ms=2000")
    await fleet.append(300)
    worker = await fleet.worker("a")
    await fleet.until(lambda: len(worker.live()) == PARTITIONS, "it has everything")
    await asyncio.to_thread(own_broker.kill)
    await asyncio.to_thread(own_broker.spawn)
    await asyncio.to_thread(own_broker.wait_ready)

    async def appended() -> bool:
        with contextlib.suppress(Exception):
            await fleet.append(300)
            return True
        return False

    await fleet.until(appended, "the log takes events again")
    await fleet.until(fleet.is_covered, "windows cover everything")
    assert worker.process.returncode is None
    assert await fleet.check_windows() > 20
    await worker.leave()


async def test_a_consumer_that_delivers_nothing_is_made_anew(fleet, caplog):
    """EVT-14: Faust's fetcher is gone without an error. Records are folded all the same, and a new one takes over."""
    settings = StreamsSettings(
        LogConfig(fleet.url, fleet.namespace),
        StateConfig(stall_timeout_s=1.5),
        StreamsConfig(session_timeout_s=SESSION_S, publish_interval_s=0.5, window_s=WINDOW_S),
        SystemConfig(),
    )
    clock, rng = SystemClock(), random.Random(1)
    apps = []

    def build():
        apps.append(
            build_app(settings, clock=clock, rng=rng, registry=CollectorRegistry(), environment={})
        )  # fmt: skip
        return apps[-1]

    stop = asyncio.Event()
    working = asyncio.create_task(work(settings, build, stop, clock, rng))

    def members(number):
        worker = apps[number].worker if len(apps) > number else None
        return list(worker.pool.members.values()) if hasattr(worker, "pool") else []

    await fleet.until(lambda: sum(member.live for member in members(0)) == PARTITIONS, "it has everything")
    first = members(0)
    await apps[0]._fetcher.stop()
    async with fleet.events():
        await fleet.until(lambda: len(apps) == 2, "a second application")
        assert "the group's consumer has delivered none for" in caplog.text
        assert sum(member.processor.counters.read for member in first) > 0
        await fleet.until(lambda: any(member.processor.counters.delivered for member in members(1)), "it delivers")
    await fleet.until(fleet.is_covered, "windows cover everything")
    assert await fleet.check_windows() > 20
    stop.set()
    async with asyncio.timeout(DEADLINE_S):
        await working

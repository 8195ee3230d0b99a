"""What it adds to a decision to ask two indexers, each a process with half of the KV index, in place of an own view.

Decisions one after another, and arriving by chance at some rate, with and without KV events coming in; then with one
indexer that hangs. The deadline is generous but for that last part, so that the times show what a deadline must allow.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dynamo_es.clock import SystemClock
from dynamo_es.config.tree import LogConfig, RuntimeConfig, StateConfig
from dynamo_es.log.base import Entry, EventLog
from dynamo_es.log.open import open_log
from dynamo_es.router.active_sequences import ActiveSequences, WorkerRank
from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.router.hashing import hash_prompt
from dynamo_es.router.kv_chooser import KvChooser
from dynamo_es.router.remote_index import DEFAULT_DEADLINE_S, RemoteIndex
from dynamo_es.router.request_router import RequestRouter
from dynamo_es.router.routing_request import RoutingRequest
from dynamo_es.runtime.appender import topic_configs
from dynamo_es.runtime.core import RuntimeCore, RuntimeSettings
from dynamo_es.runtime.views import RoutingViews
from schemas.codec import TopicCodec
from schemas.columns import pack_u64
from schemas.kv_events import KV_EVENTS, BlocksStored, KvEvents, key_kv_events
from tests.bench.spread import Row, latencies, percentile

WORKERS = 64
BLOCKS = 2_000_000
RECORD_BLOCKS = 1_024
BLOCK_SIZE = 16
ISL = 2_048
INDEXERS = 2
DECISIONS = 2_000
OPEN = 64
RATES = (100, 300)
EVENTS_PER_S = 500
PATIENT_S = 2.0
# Workers of the benchmark are registered nowhere; nobody may take them for gone.
LEASE = ("--lease-ttl", "3600", "--heartbeat", "600")


class Workload:
    """Prompts of which the workers have some, and the events that say so."""

    def __init__(self) -> None:
        self.rng = random.Random(9)
        self.codec = TopicCodec(KV_EVENTS)
        self.prompts = [self.tokens() for _ in range(200)]
        self.seqs = [0] * WORKERS

    def tokens(self) -> list[int]:
        return [self.rng.randrange(150_000) for _ in range(ISL)]

    def request(self, number: int) -> RoutingRequest:
        """Seven of ten prompts begin as one that is known."""
        tokens = self.rng.choice(self.prompts) if self.rng.random() < 0.7 else self.tokens()
        return RoutingRequest(f"r{number}", tokens)

    def entry(self, worker: int, columns: list[bytes]) -> Entry:
        seq = self.seqs[worker]
        self.seqs[worker] += 1
        events = [BlocksStored("device", None, column, column) for column in columns]
        value = KvEvents(1, "m", worker, 0, 1, seq, BLOCK_SIZE, seq == 0, events)
        return Entry(self.codec.encode(value), key_kv_events("m", worker, 0), self.codec.headers)

    async def fill(self, log: EventLog) -> None:
        topic = KV_EVENTS.qualified("dynamo")
        hashes = [hash_prompt(prompt, BLOCK_SIZE)[1] for prompt in self.prompts]
        for worker in range(WORKERS):
            held = [pack_u64(some[: self.rng.randrange(8, 128)]) for some in hashes if self.rng.random() < 0.3]
            entries = [self.entry(worker, held)]
            entries += [
                self.entry(worker, [self.rng.randbytes(8 * RECORD_BLOCKS)])
                for _ in range(BLOCKS // WORKERS // RECORD_BLOCKS)
            ]
            await log.append_all(topic, entries)

    async def publish(self, log: EventLog) -> None:
        """Records of 16 blocks, until it is cancelled."""
        topic = KV_EVENTS.qualified("dynamo")
        while True:
            entries = [
                self.entry(self.rng.randrange(WORKERS), [self.rng.randbytes(8 * 16)]) for _ in range(EVENTS_PER_S // 50)
            ]
            await log.append_all(topic, entries)
            await asyncio.sleep(0.02)


class Decider:
    """Makes decisions; ``OPEN`` bookings stay open."""

    def __init__(self, core: RuntimeCore, views: RoutingViews, workload: Workload, remote: RemoteIndex | None) -> None:
        index = views.kv_index
        sequences = ActiveSequences()
        chooser = KvChooser(
            None if index is None else lambda: index.state, sequences, model=lambda: "m", block_size=BLOCK_SIZE,
            settings=KvRouterSettings(), rng=workload.rng, clock=core.clock, remote=remote,
        )  # fmt: skip
        ranks = [WorkerRank(worker, 0) for worker in range(WORKERS)]
        self.router = RequestRouter(
            chooser, sequences, None, lambda: ranks, core.appender,  # type: ignore[arg-type]
            router_id=1, model=lambda: "m", block_size=BLOCK_SIZE, positions=views.positions, clock=core.clock,
            defer=core.loop.call_soon,
        )  # fmt: skip
        self.workload = workload
        self.number = 0
        self.hits = 0

    async def decide(self) -> float:
        """One decision; seconds."""
        self.number += 1
        number = self.number
        request = self.workload.request(number)
        began = time.perf_counter()
        booked = await self.router.admit(request)
        seconds = time.perf_counter() - began
        self.hits += bool(booked.choice.overlap_blocks)
        if number > OPEN:
            self.router.release(f"r{number - OPEN}")
        return seconds

    async def one_by_one(self, count: int) -> list[float]:
        return [1e3 * await self.decide() for _ in range(count)]

    async def arriving(self, rate: float, seconds: float) -> list[float]:
        """Milliseconds of decisions whose requests come at random moments."""
        tasks = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            tasks.append(asyncio.create_task(self.decide()))
            await asyncio.sleep(self.workload.rng.expovariate(rate))
        return [1e3 * seconds for seconds in await asyncio.gather(*tasks)]


@asynccontextmanager
async def indexers(url: str) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dynamo_es.cli.main", "indexer", "--log", url, "--snapshot-interval", "3600", *LEASE,
            "--log-level", "warning", stdout=asyncio.subprocess.PIPE,
        )
        for _ in range(INDEXERS)
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.stdout is not None
            assert (await process.stdout.readline()).startswith(b"ready")
        yield processes
    finally:
        for process in processes:
            process.kill()
            await process.wait()


@asynccontextmanager
async def routing(url: str, *, keeps_index: bool) -> AsyncIterator[tuple[RuntimeCore, RoutingViews]]:
    settings = RuntimeSettings(
        LogConfig(url=url), StateConfig(), RuntimeConfig(lease_ttl_s=3600, heartbeat_s=600), "router"
    )
    core = RuntimeCore(settings, loop=asyncio.get_running_loop(), clock=SystemClock(), rng=random.SystemRandom())
    try:
        await core.start()
        views = RoutingViews(core, keeps_index=keeps_index)
        await views.start()
        await views.wait_caught_up(600)
        yield core, views
    finally:
        await core.close()


async def measure_remote(url: str, log: EventLog, workload: Workload) -> list[Row]:
    what = f"decision over {INDEXERS} indexers, {ISL} tokens, {WORKERS} workers, {BLOCKS / 1e6:.0f} M blocks"
    rows: list[Row] = []
    async with indexers(url) as processes, routing(url, keeps_index=False) as (core, views):
        remote = RemoteIndex(core, deadline_s=PATIENT_S)
        await remote.start()
        while remote.missing() or len(remote.owners()) < INDEXERS:
            await asyncio.sleep(0.05)
        # Partitions that have just changed hands are answered for by both for a while.
        await asyncio.sleep(3)
        decider = Decider(core, views, workload, remote)
        await decider.one_by_one(200)
        rows += latencies(f"{what}, one by one", await decider.one_by_one(DECISIONS), "ms")
        for rate in RATES:
            times = await decider.arriving(rate, 10)
            rows += latencies(f"{what}, {rate}/s", times, "ms")
        publishing = asyncio.create_task(workload.publish(log))
        times = await decider.arriving(RATES[0], 20)
        publishing.cancel()
        name = f"{what}, {RATES[0]}/s, {EVENTS_PER_S} events/s"
        rows += latencies(name, times, "ms")
        rows.append((f"{name}, p99.9", percentile(times, 0.999), "ms"))
        for limit_ms in (5.0, 10.0, 1e3 * DEFAULT_DEADLINE_S):
            late = sum(time_ms > limit_ms for time_ms in times) / len(times)
            rows.append((f"{name}, over {limit_ms:g} ms", 100 * late, "%"))
        assert remote.counters.lookups["full"] == sum(remote.counters.lookups.values()), remote.counters
        assert decider.hits > decider.number // 4, decider.hits
        hanging = RemoteIndex(core, deadline_s=DEFAULT_DEADLINE_S)
        await hanging.start()
        decider = Decider(core, views, workload, hanging)
        processes[0].send_signal(signal.SIGSTOP)
        times = await decider.arriving(RATES[0], 10)
        processes[0].send_signal(signal.SIGCONT)
        rows += latencies(
            f"{what}, {RATES[0]}/s, one of them hangs, deadline {1e3 * hanging.deadline_s:g} ms", times, "ms"
        )
    return rows


async def measure_local(url: str, workload: Workload) -> list[Row]:
    what = f"decision over a view in memory, {ISL} tokens, {WORKERS} workers, {BLOCKS / 1e6:.0f} M blocks"
    async with routing(url, keeps_index=True) as (core, views):
        decider = Decider(core, views, workload, None)
        await decider.one_by_one(200)
        rows = latencies(f"{what}, one by one", await decider.one_by_one(DECISIONS), "ms")
        return rows + latencies(f"{what}, {RATES[0]}/s", await decider.arriving(RATES[0], 10), "ms")


async def main() -> list[Row]:
    workload = Workload()
    with tempfile.TemporaryDirectory() as folder:
        url = f"embedded://{folder}/log"
        log = open_log(url, SystemClock(), rng=random.Random())
        await log.start()
        await log.create_topics(topic_configs("dynamo", None))
        await workload.fill(log)
        rows = await measure_remote(url, log, workload)
        await log.close()
        return rows + await measure_local(url, workload)


if __name__ == "__main__":
    for row in asyncio.run(main()):
        print(*row)

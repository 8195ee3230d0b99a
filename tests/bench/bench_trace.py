"""A production conversation trace over eight mock workers: how much of the prompts each router mode finds cached.

The trace is Mooncake's (FAST'25; Apache-2.0): arrival, lengths, and ids of 512-token blocks of 12,031 requests in an
hour. Everything but time is real: router with its bookings, cost and choice, KV index fed through the topic's
encoding, mock engine with its scheduler and block manager. Time is simulated, so a run is the same on any machine.
"""

from __future__ import annotations

import gzip
import heapq
import random
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec

from dynamo_es.clock import ManualClock
from dynamo_es.engines.mock.build import build_scheduler
from dynamo_es.engines.mock.config import MockEngineConfig
from dynamo_es.engines.mock.timing import pass_seconds
from dynamo_es.engines.scheduling.block_manager import BlockManager
from dynamo_es.engines.scheduling.request import EngineRequest, PassPlan
from dynamo_es.router.active_sequences import ActiveSequences, WorkerRank
from dynamo_es.router.choosers import Chooser, RandomChooser, RoundRobinChooser
from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.router.hashing import hash_prompt
from dynamo_es.router.kv_chooser import KvChooser
from dynamo_es.router.request_router import RequestRouter
from dynamo_es.router.routing_request import RoutingRequest
from schemas.kv_events import KvEvents
from streams.kv_index import KvIndexFold
from streams.testing import FoldDriver
from tests.bench.spread import Row, percentile

TRACE = Path(__file__).parent.parent / "data" / "mooncake-conversation-trace.jsonl.gz"
WORKERS = 8
BLOCK_SIZE = 512
BLOCKS_A_WORKER = 4_096
# From the end of a pass until the router has folded what it published; measured: see bench_fold.
EVENT_DELAY_S = 0.005
SPEEDUP = 4.0


class Arrival(NamedTuple):
    """A request of the trace."""

    at_s: float
    prompt: Sequence[int]
    output: int


class _Line(msgspec.Struct):
    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace() -> list[Arrival]:
    """Prompts whose blocks are the same exactly where the trace's block ids are."""
    decoder = msgspec.json.Decoder(_Line)
    arrivals = []
    with gzip.open(TRACE, "rb") as lines:
        for text in lines:
            line = decoder.decode(text)
            prompt = [block for block in line.hash_ids for _ in range(BLOCK_SIZE)][: line.input_length]
            arrivals.append(Arrival(line.timestamp / 1000, prompt, max(1, line.output_length)))
    return arrivals


class NoSink:
    """Events of the router are not looked at here."""

    def offer(self, topic: object, key: bytes, value: object, timestamp_ms: int | None = None) -> bool:
        return True


class Worker:
    """One simulated engine with its ordered stream of KV events."""

    def __init__(self, number: int, blocks: int) -> None:
        self.number = number
        self.config = MockEngineConfig(num_gpu_blocks=blocks, block_size=BLOCK_SIZE, speedup_ratio=SPEEDUP)
        self.scheduler = build_scheduler(self.config)
        self.plan: PassPlan | None = None
        self.seq = 0

    def begin_pass(self) -> float | None:
        """Seconds that the next pass takes; None without work."""
        if self.plan is not None or not self.scheduler.has_work:
            return None
        self.plan = self.scheduler.schedule()
        return pass_seconds(self.plan.times, self.config.speedup_ratio, self.config.decode_speedup_ratio)

    def drain(self) -> KvEvents | None:
        events = self.scheduler.blocks.drain_events()
        if not events:
            return None
        self.seq += 1
        return KvEvents(1, "m", self.number, 0, 1, self.seq - 1, BLOCK_SIZE, self.seq == 1, events)


class Simulation:
    """Eight workers, one router, one clock."""

    def __init__(self, mode: str) -> None:
        self.clock = ManualClock()
        rng = random.Random(7)
        self.workers = [Worker(number, BLOCKS_A_WORKER) for number in range(WORKERS)]
        self.index = FoldDriver(KvIndexFold())
        sequences = ActiveSequences()
        ranks = [WorkerRank(number, 0) for number in range(WORKERS)]
        chooser: Chooser
        if mode == "kv":
            chooser = KvChooser(
                lambda: self.index.state, sequences, model=lambda: "m", block_size=BLOCK_SIZE,
                settings=KvRouterSettings(), rng=rng,
            )  # fmt: skip
        else:
            chooser = RandomChooser(rng) if mode == "random" else RoundRobinChooser()
        self.router = RequestRouter(
            chooser, sequences, None, lambda: ranks, NoSink(),  # type: ignore[arg-type]
            router_id=1, model=lambda: "m", block_size=BLOCK_SIZE, positions=dict, clock=self.clock,
        )  # fmt: skip
        self.cached = self.tokens = 0
        self.first_token_s: list[float] = []
        self._open: dict[EngineRequest, tuple[str, float]] = {}
        self._agenda: list[tuple[float, int, str, object]] = []
        self._order = count()
        self._now = 0.0

    def run(self, arrivals: Sequence[Arrival]) -> None:
        """All of the trace, to the end of the last request."""
        for number, arrival in enumerate(arrivals):
            self._plan(arrival.at_s, "arrive", (f"r{number}", arrival))
        while self._agenda:
            at, _, kind, what = heapq.heappop(self._agenda)
            self.clock.advance(at - self._now)
            self._now = at
            getattr(self, f"_{kind}")(what)

    def _plan(self, at: float, kind: str, what: object) -> None:
        heapq.heappush(self._agenda, (at, next(self._order), kind, what))

    def _arrive(self, what: tuple[str, Arrival]) -> None:
        request_id, arrival = what
        booked = self.router.route(RoutingRequest(request_id, arrival.prompt))
        worker = self.workers[booked.choice.rank.worker_id]
        request = EngineRequest(arrival.prompt, arrival.output, _fresh_tokens(int(request_id[1:])))
        self._open[request] = (request_id, self._now)
        worker.scheduler.add(request)
        self._go_on(worker)

    def _pass_over(self, worker: Worker) -> None:
        plan, worker.plan = worker.plan, None
        assert plan is not None
        for emission in worker.scheduler.complete(plan):
            request_id, arrived = self._open[emission.request]
            if emission.request.generated == 1:
                self.router.complete_prefill(request_id)
                self.first_token_s.append(self._now - arrived)
                self.cached += emission.request.cached_tokens
                self.tokens += emission.request.prompt_length
            if emission.finish_reason is not None:
                del self._open[emission.request]
                self.router.release(request_id)
        self._go_on(worker)

    def _fold(self, batch: KvEvents) -> None:
        self.index.feed(batch)

    def _go_on(self, worker: Worker) -> None:
        batch = worker.drain()
        if batch is not None:
            self._plan(self._now + EVENT_DELAY_S, "fold", batch)
        duration = worker.begin_pass()
        if duration is not None:
            self._plan(self._now + duration, "pass_over", worker)


def _fresh_tokens(number: int) -> Iterator[int]:
    """Generated tokens that no prompt has."""
    return count(2**31 + number)


def best_possible(arrivals: Sequence[Arrival]) -> float:
    """Share of tokens that one cache as large as all would have had, serving one request after the other."""
    blocks = BlockManager(WORKERS * BLOCKS_A_WORKER)
    cached = tokens = 0
    for arrival in arrivals:
        hashes, sequences = hash_prompt(arrival.prompt, BLOCK_SIZE)
        length = len(arrival.prompt)
        matched = blocks.match(sequences, max(0, length - 1) // BLOCK_SIZE)
        table: list[int] = []
        blocks.reuse(table, sequences, matched)
        blocks.allocate(table, -(-length // BLOCK_SIZE) - matched)
        for index in range(matched, len(sequences)):
            blocks.cache(table[index], sequences[index], hashes[index], sequences[index - 1] if index else None)
        blocks.release(table)
        cached += matched * BLOCK_SIZE
        tokens += length
    return cached / tokens


async def main() -> list[Row]:
    arrivals = read_trace()
    best = best_possible(arrivals)
    rows: list[Row] = [("trace: prompt tokens cached, one cache as large as all", 100 * best, "%")]
    for mode in ("kv", "round-robin", "random"):
        simulation = Simulation(mode)
        simulation.run(arrivals)
        share = simulation.cached / simulation.tokens
        rows += [
            (f"trace: prompt tokens cached, {mode}", 100 * share, "%"),
            (f"trace: of the best possible, {mode}", 100 * share / best, "%"),
            (f"trace: time to first token, {mode}, p50", 1000 * percentile(simulation.first_token_s, 0.5), "ms"),
            (f"trace: time to first token, {mode}, p99", 1000 * percentile(simulation.first_token_s, 0.99), "ms"),
        ]
    return rows


if __name__ == "__main__":
    import asyncio

    for row in asyncio.run(main()):
        print(*row)

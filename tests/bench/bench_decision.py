"""One routing decision: hashes, index, load, cost, booking. Its event is made and buffered right after, by the loop."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time

from dynamo_es.cli.process import settle_heap
from dynamo_es.clock import SystemClock
from dynamo_es.log.base import TopicPartition
from dynamo_es.log.buffered import BufferedAppender
from dynamo_es.log.open import open_log
from dynamo_es.router.active_sequences import ActiveSequences, WorkerRank
from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.router.hashing import hash_prompt
from dynamo_es.router.kv_chooser import KvChooser
from dynamo_es.router.request_router import RequestRouter
from dynamo_es.router.routing_request import RoutingRequest
from dynamo_es.runtime.appender import TopicAppender, topic_configs
from schemas.columns import pack_u64
from schemas.kv_events import BlocksStored, KvEvents
from streams.kv_index import KvIndexFold
from streams.testing import FoldDriver
from tests.bench.spread import Row, latencies

SCALES = ((16, 1_000_000), (64, 5_000_000))
BLOCK_SIZE = 16
ISL = 2_048
DECISIONS = 3_000
OPEN = 64


def filled_index(prompts: list[list[int]], rng: random.Random, workers: int, total: int) -> FoldDriver:
    """``total`` blocks over the workers; each known prompt is cached to some depth on some of them."""
    driver = FoldDriver(KvIndexFold())
    for worker in range(workers):
        events = []
        for prompt in prompts:
            if rng.random() < 0.3:
                column = pack_u64(hash_prompt(prompt, BLOCK_SIZE)[1][: rng.randrange(8, 128)])
                events.append(BlocksStored("device", None, column, column))
        driver.feed(KvEvents(1, "m", worker, 0, 1, 0, BLOCK_SIZE, True, events))
        blocks = sum(driver.state.models["m"].tier_blocks)
        for seq, _ in enumerate(range(blocks, total * (worker + 1) // workers, 4096), 1):
            column = rng.randbytes(8 * 4096)
            batch = KvEvents(
                1, "m", worker, 0, 1, seq, BLOCK_SIZE, False, [BlocksStored("device", None, column, column)]
            )
            driver.feed(batch)
    return driver


async def main() -> list[Row]:
    return [row for workers, total in SCALES for row in await measure(workers, total)]


async def measure(workers: int, total: int) -> list[Row]:
    rng = random.Random(9)
    prompts = [[rng.randrange(150_000) for _ in range(ISL)] for _ in range(200)]
    driver = filled_index(prompts, rng, workers, total)
    with tempfile.TemporaryDirectory() as folder:
        log = open_log(f"embedded://{folder}/log", SystemClock(), rng=rng)
        await log.start()
        await log.create_topics(topic_configs("bench", None))
        buffer = BufferedAppender(log, SystemClock(), rng)
        buffer.start()
        sequences = ActiveSequences()
        settings = KvRouterSettings()
        chooser = KvChooser(
            lambda: driver.state, sequences, model=lambda: "m", block_size=BLOCK_SIZE, settings=settings, rng=rng
        )
        ranks = [WorkerRank(worker, 0) for worker in range(workers)]
        positions = {TopicPartition("bench.kv-events", number): 12_345 for number in range(8)}
        router = RequestRouter(
            chooser, sequences, None, lambda: ranks, TopicAppender(log, buffer, "bench", SystemClock()),  # type: ignore[arg-type]
            router_id=1, model=lambda: "m", block_size=BLOCK_SIZE, positions=lambda: positions, clock=SystemClock(),
            defer=asyncio.get_running_loop().call_soon,
        )  # fmt: skip
        settle_heap()
        times = []
        for number in range(DECISIONS):
            fresh = [rng.randrange(150_000) for _ in range(ISL)]
            tokens = rng.choice(prompts) if rng.random() < 0.7 else fresh
            started = time.perf_counter()
            router.route(RoutingRequest(f"r{number}", tokens))
            times.append((time.perf_counter() - started) * 1e6)
            if number >= OPEN:
                router.release(f"r{number - OPEN}")
            if number % 8 == 0:
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        await buffer.close(30)
        await log.close()
    blocks = sum(driver.state.models["m"].tier_blocks)
    return latencies(f"decision, {ISL} tokens, {workers} workers, {blocks / 1e6:.1f} M blocks", times, "µs")


if __name__ == "__main__":
    for row in asyncio.run(main()):
        print(*row)

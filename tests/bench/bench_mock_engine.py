"""CPU time of the mock engine for a short request, without delay: ``python -m tests.bench.bench_mock_engine``.

The sink encodes every record, as the log's appender does; the client is in the figure. A worker process that is to
serve 1,500 requests/s beside its transport has about 300 µs for each in here.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import msgspec
import uvloop

from dynamo_es.clock import SystemClock
from dynamo_es.engines.mock.config import MockEngineConfig
from dynamo_es.engines.mock.engine import MockEngine
from dynamo_es.engines.mock.text import PlainTokens
from schemas.catalog import TOPICS
from schemas.codec import TopicCodec
from schemas.topic import TopicSpec
from tests.unit.publishers.support import ListSink, Scope

SHARED_TOKENS = 64


class EncodingSink(ListSink):
    """Encodes and forgets."""

    def __init__(self) -> None:
        super().__init__()
        self._codecs = {spec.name: TopicCodec(spec) for spec in TOPICS}
        self.offered = 0
        self.bytes = 0

    def offer(self, topic: TopicSpec, key: bytes, value: msgspec.Struct) -> bool:
        self.offered += 1
        self.bytes += len(key) + len(self._codecs[topic.name].encode(value))
        return True


async def measure(requests: int, concurrency: int, prompt_tokens: int, output_tokens: int) -> None:
    sink = EncodingSink()
    engine = MockEngine(MockEngineConfig(speedup_ratio=0), clock=SystemClock(), output_tokens=PlainTokens())
    engine.publish_to(Scope(sink))
    await engine.start()
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            own = [(number * 7919 + index) % 50_000 for index in range(prompt_tokens - SHARED_TOKENS)]
            request = {
                "token_ids": [*range(SHARED_TOKENS), *own],
                "stop_conditions": {"max_tokens": output_tokens},
            }
            async for _ in engine.generate_batches(request):
                pass

    cpu, wall = time.process_time(), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    await engine.close()
    print(
        f"{requests} requests, {concurrency} at a time, {prompt_tokens} prompt and {output_tokens} output tokens: "
        f"{cpu / requests * 1e6:.0f} µs CPU a request, {requests / wall:.0f} requests/s, {engine.passes} passes, "
        f"{sink.offered} records, {sink.bytes / requests:.0f} log bytes a request"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    requests = parser.parse_args().requests
    for concurrency, prompt_tokens, output_tokens in ((64, 128, 16), (8, 128, 16), (256, 128, 16), (64, 1024, 64)):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(measure(requests, concurrency, prompt_tokens, output_tokens))


if __name__ == "__main__":
    main()

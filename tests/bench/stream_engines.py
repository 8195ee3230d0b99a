"""The processes that ``bench_many_streams`` measures: engines that note when they made each token, and who serves them.

Four mock engines take turns, so that not all tokens are made at one instant. On standard input a process is asked for a
report, one line each: a file for the times of the tokens, which it forgets then; the answer is a line of JSON.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import signal
import sys
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import msgspec
import uvloop

from dynamo_es.cli.process import settle_heap
from dynamo_es.clock import SystemClock
from dynamo_es.config.tree import FrontendConfig, LogConfig, MockConfig, RuntimeConfig, StateConfig, WorkerConfig
from dynamo_es.engines.mock.config import MockEngineConfig
from dynamo_es.engines.mock.engine import MockEngine
from dynamo_es.engines.mock.setup import make_args
from dynamo_es.engines.mock.text import OutputTokens, SentenceTokens
from dynamo_es.engines.mock_worker import Material, MockWorker, MockWorkerSettings
from dynamo_es.frontend.app import build_app
from dynamo_es.frontend.contracts import ServedModel
from dynamo_es.frontend.server import serve
from dynamo_es.frontend.tokenizer_files import load_tokenizer
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.core import RuntimeCore, RuntimeSettings
from dynamo_es.runtime.model_card import read_model_facts

MODEL = str(Path(__file__).parents[1] / "data" / "models" / "smollm2-135m-instruct")
NAME = "m"
ENGINES = 4
BLOCKS = 12_000
"""Room for 250 streams: an engine's cache is full, and takes no more memory, after the first round."""
FLOOR_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
FLOOR_CHUNK = b'd5\r\ndata: {"id":"%b","choices":[{"delta":{"content":" token"}}]}\n\n\r\n' % (b"x" * 153)
FLOOR_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class FixedPace:
    """A ``TimingModel``: prompts take a moment, and everybody gets ``rate`` tokens a second; 0: nothing takes time."""

    def __init__(self, rate: float) -> None:
        self._pass_ms, self._token_ms = (1000 / rate, 0.005) if rate else (0.0, 0.0)

    def prefill_ms(self, prefixes: Sequence[int], chunks: Sequence[int]) -> float:
        return self._token_ms * sum(chunks)

    def decode_ms(self, context_tokens: int, requests: int, capacity_tokens: int) -> float:
        return self._pass_ms if requests else 0.0


class NotedTokens:
    """An ``OutputTokens`` that notes when each token is taken: at the end of the pass that made it."""

    def __init__(self, tokens: OutputTokens) -> None:
        self._tokens = tokens
        self.times: dict[str, array[float]] = {}

    def __call__(self, request: Mapping[str, Any], choice: int) -> Iterator[int]:
        noted = self.times[request["request_id"]] = array("d")
        for token in self._tokens(request, choice):
            noted.append(time.monotonic())
            yield token

    def hand_over(self, file: str) -> None:
        """Write the times of all requests, and forget them."""
        Path(file).write_bytes(msgspec.msgpack.encode({key: times.tobytes() for key, times in self.times.items()}))
        self.times.clear()


class TurnsOfEngines:
    """A ``TokenEngine`` over engines in this process."""

    def __init__(self, engines: Sequence[MockEngine]) -> None:
        self._turns = itertools.cycle(engines)

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
        named = {**request, "request_id": context.id()}
        async with aclosing(next(self._turns).generate_batches(named, context)) as batches:
            async for frames in batches:
                yield frames


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def obey(tokens: NotedTokens, counts: Callable[[], dict[str, int]]) -> None:
    """Answer until SIGTERM or the end of standard input."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    loop.add_signal_handler(signal.SIGTERM, reader.feed_eof)
    while line := (await reader.readline()).decode().strip():
        if line != "-":
            tokens.hand_over(line)
        gc.collect()
        told = {"tasks": len(asyncio.all_tasks()), "resident_bytes": resident_bytes()}
        print(json.dumps(told | counts()), flush=True)
    transport.close()


def noted_sentences() -> NotedTokens:
    tokenizer, _ = load_tokenizer(MODEL)
    return NotedTokens(SentenceTokens(lambda text: tokenizer.encode(text, False)))


async def serve_alone(rate: float) -> None:
    """A frontend with engines of its own, without workers and router."""
    from prometheus_client import CollectorRegistry

    from dynamo_es.frontend.metrics import FrontendMetrics
    from tests.unit.frontend.fakes import FixedDirectory, FixedHealth, card

    tokens, clock = noted_sentences(), SystemClock()
    config = MockEngineConfig(num_gpu_blocks=BLOCKS, max_num_seqs=None)
    engines = [MockEngine(config, clock=clock, output_tokens=tokens, timing=FixedPace(rate)) for _ in range(ENGINES)]
    tokenizer, renderer = load_tokenizer(MODEL)
    model = ServedModel(NAME, card(NAME, context_length=8192), tokenizer, renderer, TurnsOfEngines(engines), 0)
    options = FrontendConfig(http_host="127.0.0.1", http_port=0)
    with ThreadPoolExecutor(2) as executor:
        metrics = FrontendMetrics(CollectorRegistry())
        app = build_app(options, FixedDirectory({NAME: model}), FixedHealth(), metrics, clock, executor)
        server = await serve(app, options)
        for engine in engines:
            await engine.start()
        settle_heap()
        print(f"ready http://127.0.0.1:{server.port}", flush=True)
        await obey(tokens, lambda: {"streams": len(app.service.running), "in engines": _requests(engines)})
        await server.shutdown()
        for engine in engines:
            await engine.close()


def _requests(engines: Sequence[MockEngine]) -> int:
    return sum(scheduler.has_work for engine in engines for scheduler in engine.schedulers)


class _Answer(asyncio.Protocol):
    """A connection of ``serve_floor``: one answer after the other."""

    def __init__(self, open_answers: dict[_Answer, None], tokens: NotedTokens) -> None:
        self._open = open_answers
        self._tokens = tokens
        self._transport: asyncio.Transport | None = None
        self._left = 0
        self._noted: array[float] = array("d")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.pop(self, None)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        head, _, body = data.partition(b"\r\n\r\n")
        request_id = head.partition(b"x-dynamo-request-id: ")[2].partition(b"\r\n")[0].decode()
        self._left = json.loads(body)["max_tokens"]
        self._noted = self._tokens.times[request_id] = array("d")
        self._transport.write(FLOOR_HEAD)
        self._open[self] = None

    def note(self) -> None:
        self._noted.append(time.monotonic())

    def send(self) -> None:
        assert self._transport is not None
        self._left -= 1
        self._transport.write(FLOOR_CHUNK if self._left else FLOOR_CHUNK + FLOOR_END)
        if not self._left:
            del self._open[self]


async def serve_floor(rate: float) -> None:
    """No frontend at all: chunks of a usual size at the same times, written to the connections one after another."""
    loop, tokens = asyncio.get_running_loop(), noted_sentences()
    groups: list[dict[_Answer, None]] = [{} for _ in range(ENGINES)]
    turns = itertools.cycle(groups)

    def step(group: dict[_Answer, None], due: float) -> None:
        answers = list(group)
        for answer in answers:
            answer.note()
        for answer in answers:
            answer.send()
        loop.call_at(due + 1 / rate, step, group, due + 1 / rate)

    server = await loop.create_server(lambda: _Answer(next(turns), tokens), "127.0.0.1", 0)
    for place, group in enumerate(groups):
        loop.call_later(place / rate / ENGINES, step, group, loop.time() + place / rate / ENGINES)
    settle_heap()
    print(f"ready http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await obey(tokens, lambda: {"streams": sum(map(len, groups))})
    server.close()


async def serve_workers(rate: float, log: str) -> None:
    """Mock workers on the request plane, all in this process."""
    tokens, clock, loop = noted_sentences(), SystemClock(), asyncio.get_running_loop()
    process = RuntimeSettings(LogConfig(url=log), StateConfig(), RuntimeConfig(), "worker")
    mock = MockConfig(num_gpu_blocks=BLOCKS, max_num_seqs=100_000)
    settings = MockWorkerSettings(process, WorkerConfig(model_name=NAME, model_path=MODEL), mock)
    material = Material(read_model_facts(MODEL), tokens, timing=FixedPace(rate))
    first = RuntimeCore(process, loop=loop, clock=clock, rng=random.Random())
    others = [RuntimeCore(process, loop=loop, clock=clock, rng=random.Random(), host=first) for _ in range(ENGINES - 1)]
    first.companions.extend(others)
    workers = [MockWorker(settings, make_args(mock, None), material, core) for core in (first, *others)]
    ready: asyncio.Queue[int] = asyncio.Queue()
    tasks = [asyncio.create_task(worker.run(ready.put_nowait)) for worker in workers]
    for _ in workers:
        await ready.get()
    settle_heap()
    print("ready", flush=True)
    engines = [worker._engine for worker in workers]
    plane = [core.server for core in (first, *others)]
    await obey(tokens, lambda: {"streams": sum(server.streams for server in plane), "in engines": _requests(engines)})
    await asyncio.gather(*(core.close() for core in (first, *others)))
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    role, pace, *where = sys.argv[1:]
    roles: dict[str, Callable[..., Any]] = {"alone": serve_alone, "floor": serve_floor, "workers": serve_workers}
    uvloop.run(roles[role](float(pace), *where))

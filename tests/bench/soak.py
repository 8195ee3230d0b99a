"""A fleet under load for half an hour: does its memory stay flat, does it keep up, does nothing go wrong?

    python -m tests.bench.soak [--minutes 30] [--rate 20] [--backend embedded|kafka] [--samples FILE]

Real processes: one frontend with KV routing, two workers with mock engines, and on Kafka one stream worker. Clients
ask chats at a steady rate, half of them streamed, some about the same document; every tenth hangs up in the middle.
Every few seconds positions and error counters of each process are read from its ``/metrics``, and from Linux its open
files (tables of RocksDB apart, which have a bound) and its own memory: pages of files, which Linux drops and reads
again as it likes, are not counted. What is measured before the warm-up ends (caches fill, windows begin to expire) does
not count. Exit code 1 if memory of a process grew by more than 5 %, a fold fell behind, or anything went wrong.

Kafka is the broker that KAFKA_BOOTSTRAP_SERVERS names, else one is started (Java 17 and Maven).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from pathlib import Path

import httpx

from dynamo_es.clock import SystemClock
from dynamo_es.log.base import EventLog
from dynamo_es.log.open import open_log
from tests.bench.brokers import kafka_here
from tests.bench.soak_verdict import MIN_SAMPLES, Judgement, Sample, judge
from tests.bench.spread import percentile
from tests.support.fleet import MODEL, Fleet, Process

SAMPLE_S = 5.0
TOLD_S = 60.0
ANSWER_TIMEOUT_S = 30.0
# Requests under way, in seconds of load; with more the fleet does not keep up.
MAX_BACKLOG_S = 20.0
DISCONNECTS = 0.1
STREAMED = 0.5
DOCUMENTS = 60
# What has an end in a day has one in the warm-up here.
SHORT_LIVES = ("--topic-retention", "requests=2min,forward-pass=2min", "--snapshot-interval", "20")
WORKER = ("--num-gpu-blocks-override", "4096", "--speedup-ratio", "5", "--system-host", "127.0.0.1")
STREAMS = ("--streams-window", "5", "--streams-window-retention", "60")


class Clients:
    """Asks ``rate`` chats a second and keeps what went wrong. ``first_tokens``: seconds to the first token."""

    def __init__(self, base: str, rate: float, rng: random.Random) -> None:
        self._url = f"{base}/v1/chat/completions"
        self._rate = rate
        self._rng = rng
        words = [f"{rng.getrandbits(40):x}" for _ in range(1000)]
        self._documents = [" ".join(rng.choices(words, k=150)) for _ in range(DOCUMENTS)]
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.first_tokens: list[float] = []

    async def run(self, until: float) -> None:
        """Ask until the loop's time is ``until``, then wait for the answers."""
        loop = asyncio.get_running_loop()
        begun, number = loop.time(), 0
        async with self._client() as http, asyncio.TaskGroup() as group:
            asked: set[asyncio.Task[None]] = set()
            while (due := begun + number / self._rate) < until:
                await asyncio.sleep(max(0.0, due - loop.time()))
                number += 1
                if len(asked) > MAX_BACKLOG_S * self._rate:
                    self.errors["not sent: too many requests wait for their answer"] += 1
                    continue
                task = group.create_task(self._ask(http))
                asked.add(task)
                task.add_done_callback(asked.discard)

    @staticmethod
    def _client() -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        return httpx.AsyncClient(timeout=ANSWER_TIMEOUT_S, limits=limits)

    async def _ask(self, http: httpx.AsyncClient) -> None:
        streamed, leaves = self._rng.random() < STREAMED, self._rng.random() < DISCONNECTS
        question = f"{self._rng.choice(self._documents)} {self._rng.getrandbits(64):x}?"
        body = {
            "model": MODEL,
            "stream": streamed,
            "max_tokens": self._rng.randint(1, 48),
            "messages": [{"role": "user", "content": question}],
        }
        patience_s = self._rng.uniform(0.0, 0.1) if leaves else None
        self.counts["streamed" if streamed else "whole"] += 1
        try:
            async with asyncio.timeout(patience_s):
                await (self._stream(http, body) if streamed else self._whole(http, body))
        except TimeoutError:
            self.counts["left"] += 1
        except httpx.HTTPError as error:
            self.errors[repr(error)] += 1

    async def _whole(self, http: httpx.AsyncClient, body: dict[str, object]) -> None:
        answer = await http.post(self._url, json=body)
        if answer.status_code != 200 or not answer.json()["choices"][0]["message"]["content"]:
            self.errors[f"{answer.status_code} {answer.text[:200]}"] += 1

    async def _stream(self, http: httpx.AsyncClient, body: dict[str, object]) -> None:
        began, first, line = time.perf_counter(), True, ""
        async with http.stream("POST", self._url, json=body) as answer:
            async for line in answer.aiter_lines():
                if first and '"content"' in line:
                    first = False
                    self.first_tokens.append(time.perf_counter() - began)
                if line == "data: [DONE]":
                    break
            if answer.status_code != 200 or line != "data: [DONE]":
                self.errors[f"{answer.status_code} {line[:200]}"] += 1


class Probe:
    """Reads the metrics of all processes, and where the log ends."""

    def __init__(self, fleet: Fleet, log: EventLog, urls: dict[str, str]) -> None:
        self._fleet = fleet
        self._log = log
        self._urls = urls
        self.samples: list[Sample] = []
        self.errors: Counter[str] = Counter()

    async def run(self, began: float, until: float) -> None:
        """A sample every few seconds from now on until the loop's time is ``until``."""
        loop = asyncio.get_running_loop()
        told = loop.time()
        async with httpx.AsyncClient(timeout=ANSWER_TIMEOUT_S) as http:
            while loop.time() < until:
                try:
                    self.samples.append(await self._look(http, loop.time() - began))
                except httpx.HTTPError as error:
                    self.errors[f"a process does not tell its metrics: {error!r}"] += 1
                if loop.time() - told >= TOLD_S and self.samples:
                    told = loop.time()
                    self._tell(self.samples[-1])
                await asyncio.sleep(SAMPLE_S)

    async def _look(self, http: httpx.AsyncClient, at_s: float) -> Sample:
        sample = Sample(at_s)
        for running in self._fleet.processes:
            sample.add_page(running.name, (await http.get(f"{self._urls[running.name]}/metrics")).text)
            # Nothing that could block: the kernel makes it up.
            sample.add_status(running.name, Path(f"/proc/{running.process.pid}/status").read_text())  # noqa: ASYNC240
            sample.add_files(running.name, open_files(running.process.pid))
        for topic in {place.topic for place in sample.positions}:
            bounds = await self._log.bounds(f"{self._fleet.namespace}.{topic}")
            sample.ends[topic] = float(sum(limits.end for limits in bounds.values()))
        return sample

    @staticmethod
    def _tell(sample: Sample) -> None:
        memory = ", ".join(f"{process} {own / 2**20:.1f} MiB" for process, own in sample.own_bytes.items())
        lag = max(map(sample.lag, sample.positions))
        print(f"{sample.at_s / 60:5.1f} min: {memory}; largest lag {lag:.0f} records", flush=True)


def open_files(pid: int) -> list[str]:
    """What a process has open."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        # One that is closed meanwhile.
        with contextlib.suppress(FileNotFoundError):
            found.append(str(descriptor.readlink()))
    return found


async def start_fleet(fleet: Fleet, streams: bool) -> dict[str, str]:
    """Status URLs of the processes by name."""
    await fleet.frontend(*SHORT_LIVES, "--state-flush-interval", "2")
    urls = {"frontend": fleet.base}
    for number in (1, 2):
        worker = await fleet.worker(number, *SHORT_LIVES, *WORKER, "--system-port", "0")
        urls[worker.name] = await logged(worker, r"system status on (\S+)")
    if streams:
        process = await fleet.start_streams(*SHORT_LIVES, *STREAMS, "--system-port", "0", "--system-host", "127.0.0.1")
        urls[process.name] = "http://127.0.0.1:" + await logged(process, r"status of this worker on port (\d+)")
    await fleet.wait_workers(2)
    return urls


async def logged(process: Process, pattern: str) -> str:
    """What a process wrote to its log that matches."""
    async with asyncio.timeout(60):
        while (found := re.search(pattern, process.log())) is None:
            await asyncio.sleep(0.05)
    return found[1]


def count_log_errors(fleet: Fleet, seen: dict[str, int]) -> Counter[str]:
    """Messages of severity ERROR and above, and stack traces, without their time. ``seen``: characters to skip."""
    found: Counter[str] = Counter()
    for process in fleet.processes:
        for line in process.log()[seen[process.name] :].splitlines():
            if re.search(r" (ERROR|CRITICAL) |^Traceback", line):
                found[f"{process.name} logs: {re.sub(r'^[0-9-]+ [0-9:,]+ ', '', line)[:200]}"] += 1
    return found


@contextlib.asynccontextmanager
async def log_at(backend: str, folder: Path) -> AsyncIterator[str]:
    """URL of a log that lives as long as the soak."""
    if backend == "embedded":
        yield f"embedded://{folder}/log"
    else:
        async with kafka_here() as broker:
            if broker is None:
                raise SystemExit(1)
            yield broker.url


async def soak(options: argparse.Namespace, folder: Path) -> list[Judgement]:
    """Run it; the verdict, what went wrong last."""
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(log_at(options.backend, folder))
        fleet = Fleet(url, folder, f"soak-{uuid.uuid4().hex[:8]}", lease=())
        stack.push_async_callback(fleet.close)
        urls = await start_fleet(fleet, streams=options.backend == "kafka")
        log = open_log(url, SystemClock())
        stack.push_async_callback(log.close)
        await log.start()
        clients, probe = Clients(fleet.base, options.rate, random.Random(1)), Probe(fleet, log, urls)
        # What a start tells is not the soak's: aiokafka calls it an error that a new group has no coordinator yet.
        seen = {process.name: len(process.log()) for process in fleet.processes}
        began = asyncio.get_running_loop().time()
        until = began + 60 * options.minutes
        async with asyncio.TaskGroup() as group:
            group.create_task(clients.run(until))
            group.create_task(probe.run(began, until))
        ended = [process.name for process in fleet.processes if process.process.returncode is not None]
        errors = clients.errors + probe.errors + count_log_errors(fleet, seen)
        errors.update(f"{name} ended" for name in ended)
    if options.samples is not None:
        options.samples.write_text("".join(json.dumps(_plain(sample)) + "\n" for sample in probe.samples))
    tell_load(clients, probe.samples)
    judged = [sample for sample in probe.samples if sample.at_s >= 60 * options.warm_up_minutes]
    return [*judge(judged), *(Judgement(what, f"{count} times", False) for what, count in errors.items())]


def tell_load(clients: Clients, samples: Sequence[Sample]) -> None:
    """What the load was and what it cost; no part of the verdict."""
    told = ", ".join(f"{count} {what}" for what, count in sorted(clients.counts.items()))
    print(f"\nrequests: {told}")
    if clients.first_tokens:
        p50, p99 = (1000 * percentile(clients.first_tokens, share) for share in (0.5, 0.99))
        print(f"time to first token as the client saw it: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    first, last = samples[0], samples[-1]
    for process, cpu_s in last.cpu_s.items():
        share = (cpu_s - first.cpu_s[process]) / (last.at_s - first.at_s)
        rss_mib = last.rss_bytes[process] / 2**20
        print(f"{process}: {share:.1%} of a core, at the end {rss_mib:.1f} MiB with the pages of files")


def _plain(sample: Sample) -> dict[str, object]:
    return {**asdict(sample), "positions": {" ".join(place): at for place, at in sample.positions.items()}}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 flat and without errors, 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="how long, the warm-up included; default 30")
    parser.add_argument("--warm-up-minutes", type=float, help="of it before anything counts; default a third")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second; default 20")
    parser.add_argument("--backend", choices=("embedded", "kafka"), default="embedded", help="default embedded")
    parser.add_argument("--samples", type=Path, metavar="FILE", help="write what was measured there, a line a sample")
    options = parser.parse_args(arguments)
    if options.warm_up_minutes is None:
        options.warm_up_minutes = options.minutes / 3
    if 60 * (options.minutes - options.warm_up_minutes) < 2 * MIN_SAMPLES * SAMPLE_S:
        parser.error(f"after the warm-up at least {2 * MIN_SAMPLES * SAMPLE_S / 60:.1f} minutes are needed")
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        judgements = asyncio.run(soak(options, Path(folder)))
    print()
    for judgement in judgements:
        print(f"{'good' if judgement.good else 'BAD '}  {judgement.what}: {judgement.found}")
    bad = sum(not judgement.good for judgement in judgements)
    print(f"\n{f'{bad} things are not well' if bad else 'all good'}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())

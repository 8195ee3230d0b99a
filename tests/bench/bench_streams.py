"""One worker of the stream processors folding KV events: what Faust delivers, and what the worker reads itself.

Records of 32 events of 16 blocks. Uses the broker that KAFKA_BOOTSTRAP_SERVERS names, else starts one (Java 17 and
Maven), else measures nothing.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import time
import urllib.request
import uuid
from pathlib import Path

from dynamo_es.clock import SystemClock
from dynamo_es.log.base import Entry, EventLog
from dynamo_es.log.open import open_log
from dynamo_es.runtime.appender import topic_configs
from schemas.kv_events import KV_EVENTS
from tests.bench.brokers import kafka_here
from tests.bench.kv_history import append, entries
from tests.bench.spread import Row, rounds

WORKERS = 64
RECORDS = 12_000
EVENTS = 32
BLOCKS = 16
ROUNDS = 3
TARGET = 60_000
TIMEOUT_S = 120.0
# A page of metrics costs the worker some milliseconds.
LOOK_S = 0.2


class Worker:
    """``dynamo-es streams`` in a process, seen through its metrics."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, messages: asyncio.Task[bytes]) -> None:
        self.process = process
        self._messages = messages
        self._url = f"http://127.0.0.1:{port}/metrics"

    @classmethod
    async def start(cls, url: str, namespace: str, folder: Path) -> Worker:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dynamo_es.cli.main", "streams", "--log", url, "--topic-namespace", namespace,
            "--state-dir", str(folder), "--system-port", "0", "--system-host", "127.0.0.1",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stderr is not None
        seen = b""
        while (found := re.search(rb"status of this worker on port (\d+)", seen)) is None:
            line = await process.stderr.readline()
            if not line:
                raise RuntimeError(seen.decode())
            seen += line
        return cls(process, int(found[1]), asyncio.create_task(process.stderr.read()))

    async def total(self, metric: str, labels: str = "") -> float:
        """A metric summed over the partitions of kv-events; ``labels``: only samples that have this."""
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(self._url, timeout=10).read().decode())
        found = re.findall(rf"^dynamo_es_streams_{metric}\{{(.*)\}} (.*)$", text, re.MULTILINE)
        return sum(float(value) for told, value in found if '.kv-events"' in told and labels in told)

    async def cpu_s(self) -> float:
        """Processor time so far, of all threads."""
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(self._url, timeout=10).read().decode())
        found = re.search(r"^process_cpu_seconds_total (.*)$", text, re.MULTILINE)
        assert found is not None
        return float(found[1])

    async def until_live(self) -> None:
        while await self.total("partition_status", 'status="live"') < KV_EVENTS.partitions:
            await asyncio.sleep(LOOK_S)

    async def until(self, metric: str, value: float) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while await self.total(metric) < value:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{metric} is {await self.total(metric)}, not {value}")
            await asyncio.sleep(LOOK_S)

    async def stop(self) -> None:
        self.process.terminate()
        await self.process.wait()
        await self._messages


async def delivered_rate(log: EventLog, url: str, records: list[Entry]) -> tuple[float, float, float]:
    """Events folded a second from the first append to the last record, the same by processor time (which neighbours do
    not change), and the share that Faust delivered."""
    namespace = await new_topics(log)
    with tempfile.TemporaryDirectory() as folder:
        worker = await Worker.start(url, namespace, Path(folder))
        await worker.until_live()
        started, spent_s = time.perf_counter(), await worker.cpu_s()
        await append(log, namespace, records, at_once=200)
        await worker.until("position_offset", len(records))
        rate = len(records) * EVENTS / (time.perf_counter() - started)
        rate_cpu = len(records) * EVENTS / (await worker.cpu_s() - spent_s)
        share = 1 - await worker.total("read_total") / len(records)
        await worker.stop()
    return rate, rate_cpu, share


async def recovery_rate(log: EventLog, url: str, records: list[Entry]) -> float:
    """Events folded a second by a worker without state, between a tenth and all of the records."""
    namespace = await new_topics(log)
    await append(log, namespace, records, at_once=200)
    with tempfile.TemporaryDirectory() as folder:
        worker = await Worker.start(url, namespace, Path(folder))
        await worker.until("position_offset", len(records) / 10)
        done, started = await worker.total("position_offset"), time.perf_counter()
        await worker.until("position_offset", len(records))
        rate = (len(records) - done) * EVENTS / (time.perf_counter() - started)
        await worker.stop()
    return rate


async def new_topics(log: EventLog) -> str:
    namespace = f"bench-{uuid.uuid4().hex[:8]}"
    await log.create_topics(topic_configs(namespace, 1))
    return namespace


async def main() -> list[Row]:
    async with kafka_here() as broker:
        return [] if broker is None else await measure(broker.url)


async def measure(url: str) -> list[Row]:
    log = open_log(url, SystemClock())
    await log.start()
    records = entries(RECORDS, workers=WORKERS, events=EVENTS, blocks=BLOCKS)
    try:
        delivered = [await delivered_rate(log, url, records) for _ in range(ROUNDS)]
        recovered = [await recovery_rate(log, url, records) for _ in range(ROUNDS)]
    finally:
        await log.close()
    what = f"events of {BLOCKS} blocks, {EVENTS} a record"
    return [
        *rounds(f"one worker, {what}, by Faust (target {TARGET:,})", [rate for rate, _, _ in delivered], "events/s"),
        *rounds("the same by processor time", [rate for _, rate, _ in delivered], "events/s of CPU"),
        ("of which delivered and not read", 100 * min(share for _, _, share in delivered), "%"),
        *rounds(f"one worker, {what}, recovering", recovered, "events/s"),
    ]


if __name__ == "__main__":
    for row in asyncio.run(main()):
        print(*row)

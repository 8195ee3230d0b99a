"""How long a partition of the stream processors goes without a snapshot when a worker joins, leaves or is killed.

Two workers, events all the time, a snapshot every ``SNAPSHOT_S`` seconds, the session timeout that workers have by
default. A gap is the time between the last snapshot of a partition by one worker and the first by the other one; of
each round the longest counts. At the end published windows and snapshots are compared with a fold from the start.
Uses the broker that KAFKA_BOOTSTRAP_SERVERS names, else starts one (Java 17 and Maven), else measures nothing.

``python -m tests.bench.bench_rebalance [--rounds 5]``
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import tempfile
import time
from pathlib import Path

from dynamo_es.clock import SystemClock
from dynamo_es.config.tree import StreamsConfig
from dynamo_es.log.open import open_log
from tests.bench.brokers import kafka_here
from tests.bench.spread import Row, rounds
from tests.support.stream_fleet import PARTITIONS, SNAPSHOT_S, StreamFleet, StreamWorker

ROUNDS = 5
# Partitions that a second worker has at least when it has its share.
SHARE = PARTITIONS // 3


class Rebalances:
    """One worker that stays and others that come and go; ``gaps`` and ``seconds`` by what happened."""

    def __init__(self, fleet: StreamFleet) -> None:
        self.fleet = fleet
        self.gaps: dict[str, list[float]] = {"join": [], "clean leave": [], "kill -9": []}
        self._number = 0

    async def begin(self) -> None:
        await self.fleet.append(1500)
        self.first = await self._worker("first")
        await self.fleet.until(lambda: len(self.first.live()) == PARTITIONS, "the first worker has everything")

    async def round(self) -> None:
        for how in ("clean leave", "kill -9"):
            second = await self._join()
            await self._end(second, how)

    async def _join(self) -> StreamWorker:
        self._number += 1
        began_ms, before = time.time_ns() // 1_000_000, await self.fleet.manifests()
        second = await self._worker(f"second-{self._number}")
        await self.fleet.until(lambda: len(second.live()) >= SHARE, "the second worker has its share")
        moved = self.fleet.snapshots_of(second)
        await self.fleet.until(lambda: self.fleet.are_newer(before, moved, second), "its snapshots")
        self.gaps["join"].append(max(await self.fleet.handovers(began_ms), default=0.0))
        return second

    async def _end(self, second: StreamWorker, how: str) -> None:
        moved, before = self.fleet.snapshots_of(second), await self.fleet.manifests()
        began_ms = time.time_ns() // 1_000_000
        if how == "clean leave":
            await second.leave()
        else:
            second.ends = True
            second.process.send_signal(signal.SIGKILL)
            await second.process.wait()
        await self.fleet.until(lambda: self.fleet.are_newer(before, moved, self.first), "snapshots by the first worker")
        self.gaps[how].append(max(await self.fleet.handovers(began_ms), default=0.0))

    async def _worker(self, folder: str) -> StreamWorker:
        session_s = str(StreamsConfig().session_timeout_s)
        return await self.fleet.worker(folder, DYN_ES_STREAMS_SESSION_TIMEOUT=session_s)


async def measure(url: str, count: int) -> list[Row]:
    log = open_log(url, SystemClock())
    await log.start()
    with tempfile.TemporaryDirectory() as folder:
        fleet = StreamFleet(log, url, Path(folder))
        try:
            await fleet.start()
            rebalances = Rebalances(fleet)
            async with fleet.events():
                await rebalances.begin()
                for _ in range(count):
                    await rebalances.round()
            await fleet.until(fleet.is_covered, "windows cover everything")
            windows = await fleet.check_windows()
            await rebalances.first.leave()
            await fleet.check_snapshots()
        finally:
            await fleet.close()
            await log.close()
    rows: list[Row] = []
    for how, gaps in rebalances.gaps.items():
        rows += rounds(f"a snapshot every {SNAPSHOT_S} s: longest gap at {how}", gaps, "s")
    return [*rows, ("windows, all equal to a fold from the start", windows, "")]


async def run(count: int) -> list[Row]:
    async with kafka_here() as broker:
        return [] if broker is None else await measure(broker.url, count)


def main() -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    return asyncio.run(run(parser.parse_args().rounds))


if __name__ == "__main__":
    for row in main():
        print(*row)

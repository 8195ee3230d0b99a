"""A broker that is away for a minute under steady load: failed requests, times to first token, time to converge.

One frontend with KV routing, four mock workers in one process, a broker of its own, streamed answers; everything and
the load on this machine. Needs Java 17 and Kafka's jars (see tests/kafka/broker.py). Sequence: warm-up, load with the
log, load without, load with it again. ``hung`` stops the broker's process (it answers nothing and closes nothing),
``killed`` ends it and starts it again.

``python -m tests.bench.bench_log_away [--away 60] [--rate 200] [--how hung killed]``
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from dynamo_es.clock import SystemClock
from dynamo_es.log.open import open_log
from tests.bench.spread import Row, percentile
from tests.kafka.broker import KafkaBroker, free_port, missing_tools
from tests.support.convergence import wait_converged
from tests.support.fleet import MODEL, Fleet
from tests.support.steady_load import Outcome, SteadyLoad

WORKERS = 4
WARM_UP_S = 10.0
CONVERGE_TIMEOUT_S = 120.0
HOWS = ("hung", "killed")


class Outage:
    """The broker goes and comes back, as ``how`` says."""

    def __init__(self, broker: KafkaBroker, how: str) -> None:
        self._broker, self._how = broker, how

    def begin(self) -> None:
        if self._how == "killed":
            self._broker.kill()
        else:
            os.kill(self._broker.pid or 0, signal.SIGSTOP)

    async def end(self) -> None:
        """Until the broker answers."""
        if self._how == "killed":
            self._broker.spawn()
            await asyncio.to_thread(self._broker.wait_ready)
        else:
            os.kill(self._broker.pid or 0, signal.SIGCONT)


def describe(what: str, outcomes: Sequence[Outcome]) -> list[Row]:
    waits = [outcome.first_token_s * 1000 for outcome in outcomes if outcome.first_token_s is not None]
    failed = [outcome.error for outcome in outcomes if outcome.error is not None]
    for error in failed[:3]:
        print(f"{what}: {error}")
    return [
        (f"{what}: requests", len(outcomes), ""),
        (f"{what}: failed", len(failed), ""),
        (f"{what}: time to first token p50", percentile(waits, 0.5), "ms"),
        (f"{what}: time to first token p99", percentile(waits, 0.99), "ms"),
    ]


async def measure(how: str, rate: float, away_s: float, folder: Path) -> list[Row]:
    broker = KafkaBroker(folder / "broker")
    broker.start()
    system = f"http://127.0.0.1:{(port := free_port())}"
    # The leases of a fleet, not those of tests: a busy machine must not look like one whose log is away.
    fleet = Fleet(f"kafka://{broker.bootstrap}", folder, lease=())
    log = open_log(fleet.url, clock=SystemClock())
    try:
        await fleet.frontend()
        workers = await fleet.start(
            "workers", "worker", "mock", "--model-name", MODEL, "--num-workers", str(WORKERS),
            "--system-port", str(port),
        )  # fmt: skip
        await workers.wait_ready()
        await fleet.wait_workers(WORKERS)
        await log.start()
        load = SteadyLoad(fleet.base, MODEL, rate)
        outage = Outage(broker, how)
        load.start()
        await asyncio.sleep(WARM_UP_S)
        marks = [time.monotonic()]
        await asyncio.sleep(away_s)
        outage.begin()
        marks.append(time.monotonic())
        await asyncio.sleep(away_s)
        marks.append(time.monotonic())
        await outage.end()
        appended_s, converged_s = await wait_converged(log, fleet.namespace, [fleet.base], [system], CONVERGE_TIMEOUT_S)
        await asyncio.sleep(max(0.0, away_s / 2 - converged_s))
        marks.append(time.monotonic())
        await load.stop()
    finally:
        await fleet.close()
        await log.close()
        broker.stop()
    rows: list[Row] = []
    for phase, begin, end in zip(("before", "away", "after"), marks, marks[1:], strict=False):
        rows += describe(f"{how}, {phase}", load.between(begin, end))
    p99 = {what: value for what, value, _ in rows if what.endswith("p99")}
    before, away = (p99[f"{how}, {phase}: time to first token p99"] for phase in ("before", "away"))
    rows.append((f"{how}: p99 away against before", 100 * (away / before - 1), "%"))
    rows.append((f"{how}: appended after the broker answered", appended_s, "s"))
    rows.append((f"{how}: converged after the broker answered", converged_s, "s"))
    return rows


async def run(hows: Sequence[str], rate: float, away_s: float) -> list[Row]:
    if (reason := missing_tools()) is not None:
        print(f"not measured: {reason}")
        return []
    rows: list[Row] = []
    for how in hows:
        with tempfile.TemporaryDirectory() as folder:
            rows += await measure(how, rate, away_s, Path(folder))
    return rows


def main() -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--away", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--rate", type=float, default=200.0, metavar="PER_SECOND")
    parser.add_argument("--how", nargs="+", choices=HOWS, default=HOWS)
    options = parser.parse_args()
    return asyncio.run(run(options.how, options.rate, options.away))


if __name__ == "__main__":
    for row in main():
        print(*row)

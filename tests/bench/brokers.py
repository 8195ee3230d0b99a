"""The Kafka that benchmarks measure: one that runs already, or one of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

from tests.kafka.broker import KafkaBroker, missing_tools


class Broker(NamedTuple):
    """``pid``: of a broker that was started for this; None: somebody else's, perhaps on another machine."""

    url: str
    pid: int | None

    def cpu_s(self) -> float | None:
        """Processor time so far, where it can be known (Linux)."""
        stat = Path(f"/proc/{self.pid}/stat")
        if self.pid is None or not stat.exists():
            return None
        # The name of the command is in brackets and may contain anything.
        columns = stat.read_text().rpartition(")")[2].split()
        return (int(columns[11]) + int(columns[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.asynccontextmanager
async def kafka_here() -> AsyncIterator[Broker | None]:
    """The broker that KAFKA_BOOTSTRAP_SERVERS names, or a new one; None, and a word about it, if there can be none."""
    if servers := os.environ.get("KAFKA_BOOTSTRAP_SERVERS"):
        yield Broker(f"kafka://{servers}", None)
    elif (reason := missing_tools()) is not None:
        print(f"not measured: KAFKA_BOOTSTRAP_SERVERS names no broker, and none can be started: {reason}")
        yield None
    else:
        with tempfile.TemporaryDirectory(prefix="bench-kafka-") as folder:
            broker = KafkaBroker(Path(folder))
            # On this thread, since a broker ends with the thread that started it.
            broker.spawn()
            try:
                await asyncio.to_thread(broker.wait_ready)
                yield Broker(f"kafka://{broker.bootstrap}", broker.pid)
            finally:
                await asyncio.to_thread(broker.stop)

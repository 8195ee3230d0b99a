"""How late the event loop is: a canary that sleeps and sees how much longer it took (spec/frontend.md 5.1)."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from dynamo_es.background import BackgroundTasks
from dynamo_es.clock import Clock
from dynamo_es.frontend.tally import CounterFamily, HistogramFamily, TallyCollector

SLEEP_S = 0.01
STALL_S = 0.005
_DELAYS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


class LoopCanary:
    """Measures one event loop; ``start`` on it, ``close`` at the end.

    ``<prefix>_event_loop_delay_seconds`` is the time beyond each sleep of 10 ms, ``<prefix>_event_loop_stall_total``
    counts those of more than 5 ms.
    """

    def __init__(self, registry: CollectorRegistry, prefix: str, clock: Clock) -> None:
        collector = TallyCollector()
        delay = HistogramFamily(f"{prefix}_event_loop_delay_seconds", "How late the event loop is", (), _DELAYS)
        stalls = CounterFamily(f"{prefix}_event_loop_stall_total", "Times that it was over 5 ms late", ())
        collector.add(delay)
        collector.add(stalls)
        registry.register(collector)
        self._delay, self._stalls = delay.child(), stalls.child()
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def start(self, tasks: BackgroundTasks) -> None:
        """Begin."""
        self._task = tasks.spawn(self._run(), "loop-canary")

    async def close(self) -> None:
        """Stop. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while True:
            began = self._clock.monotonic()
            await asyncio.sleep(SLEEP_S)
            late = max(0.0, self._clock.monotonic() - began - SLEEP_S)
            self._delay.observe(late)
            if late > STALL_S:
                self._stalls.value += 1

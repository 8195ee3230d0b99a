"""Metrics of sessions that are kept together and of requests that take two workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from dynamo_es.frontend.engine import RoutedTokenEngine
from dynamo_es.runtime.metrics import Collector, LabelBound, Samples, counter, gauge
from streams.sessions import SessionTable

SESSIONS = gauge("dynamo_es_sessions", "Sessions of which the log tells where they were sent last")
FORGOTTEN = counter(
    "dynamo_es_sessions_forgotten_total", "Sessions that were silent for longest when there were too many"
)
DISPATCHES = counter(
    "dynamo_es_session_dispatches_total",
    "Requests of sessions: that bound theirs, were sent where it was bound (kept), or moved it",
    "model",
    "result",
)
DISAGG = counter(
    "dynamo_es_disagg_requests_total",
    "Requests to decode workers: with a prompt computed elsewhere (handed over by bootstrap or result), or by "
    "themselves (kept_local by the policy, no_prefill worker there)",
    "model",
    "way",
)


class HopsCollector(Collector):
    """Of a frontend's routers."""

    families = (SESSIONS, FORGOTTEN, DISPATCHES, DISAGG)

    def __init__(
        self,
        engines: Callable[[], Sequence[tuple[str, RoutedTokenEngine]]],
        sessions: Callable[[], SessionTable],
        names: LabelBound,
    ) -> None:
        """``engines``: of the loaded models, by name. ``sessions``: the log's table."""
        self._engines = engines
        self._sessions = sessions
        self._names = names

    def fill(self, samples: Samples) -> None:
        """As ``Collector.fill``."""
        table = self._sessions()
        samples.add(SESSIONS, len(table))
        samples.add(FORGOTTEN, table.dropped)
        for name, engine in self._engines():
            model = self._names.of(name)
            if engine.router.affinity is not None:
                for result, count in asdict(engine.router.affinity.counters).items():
                    samples.add(DISPATCHES, count, model, result)
            if engine.disagg is not None and engine.disagg.is_active():
                for way, count in asdict(engine.disagg.counters).items():
                    samples.add(DISAGG, count, model, way)

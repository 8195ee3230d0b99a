"""Threads that decode, render and tokenize large requests off the event loop, with a bound on what waits for them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dynamo_es.frontend.errors import PREPROCESS_FULL, overloaded

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class PreprocessPool(Executor):
    """An ``Executor`` that refuses what it has no room for. ``submit`` never blocks.

    Work that is cancelled before it began is never done, and lets go of its arguments and its place at once; work that
    has begun goes on to its end (at most one piece a thread), and its place is free then.

    Args:
        threads: Pieces of work at a time.
        max_waiting: Pieces that may wait for a thread.
    """

    def __init__(self, threads: int, max_waiting: int) -> None:
        self._inner = ThreadPoolExecutor(threads, thread_name_prefix="preprocess")
        self._limit = threads + max_waiting
        self._threads = threads
        self._lock = threading.Lock()
        self._taken = 0

    @property
    def waiting(self) -> int:
        """Pieces of work that no thread has begun yet."""
        return max(0, self._taken - self._threads)

    @property
    def running(self) -> int:
        """Threads that are at work."""
        return min(self._taken, self._threads)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Take a piece of work.

        Raises:
            ApiError: 529, ``preprocess_queue_full``; as many wait as may.
        """
        with self._lock:
            if self._taken >= self._limit:
                logger.warning("refused a request: %d wait to be tokenized (--preprocess-queue)", self.waiting)
                raise overloaded(PREPROCESS_FULL)
            self._taken += 1
        work = _Work(fn, args, kwargs)
        try:
            future: Future[T] = self._inner.submit(work)
        except BaseException:
            self._leave()
            raise
        future.add_done_callback(lambda _: self._end(work))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._inner.shutdown(wait, cancel_futures=cancel_futures)

    def _end(self, work: _Work) -> None:
        work.forget()
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._taken -= 1


class _Work:
    """One call, which the queue of threads holds until its turn comes, wanted or not."""

    __slots__ = ("_call",)

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self._call: tuple[Callable[..., Any], Any, Any] | None = (fn, args, kwargs)

    def __call__(self) -> Any:
        assert self._call is not None
        fn, args, kwargs = self._call
        return fn(*args, **kwargs)

    def forget(self) -> None:
        """A request that nobody waits for any more must not keep its body."""
        self._call = None


class PreprocessCollector(Collector):
    """``<prefix>_preprocess_requests{state}``: pieces of work in the pool, ``running`` and ``waiting``."""

    def __init__(self, pool: PreprocessPool, prefix: str) -> None:
        self._pool = pool
        self._name = f"{prefix}_preprocess_requests"

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(self._name, "Large requests that threads work at", labels=["state"])
        family.add_metric(["running"], self._pool.running)
        family.add_metric(["waiting"], self._pool.waiting)
        yield family

"""What the verbs that run a process share: event loop, signals, logging."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from dynamo_es.clock import SystemClock
from dynamo_es.config.tree import LogConfig, LoggingConfig
from dynamo_es.log.base import EventLog
from dynamo_es.log.open import open_log

T = TypeVar("T")


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop where it is there, else on asyncio's own loop."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main)


def set_up_logging(config: LoggingConfig) -> None:
    """Messages to standard error, one a line."""
    logging.basicConfig(
        level=config.level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
    )


def stop_on_signals(event: asyncio.Event) -> None:
    """SIGINT and SIGTERM set ``event``; a second one ends the process at once."""
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if event.is_set():
            logging.shutdown()
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        event.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)


def settle_heap() -> None:
    """What is loaded by now stays: the garbage collector need not walk it again, and may come by less often.

    Requests leave few cycles; the default threshold of 700 objects makes a busy process collect for each few of them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


async def with_log(config: LogConfig, use: Callable[[EventLog], Awaitable[T]]) -> T:
    """Open the log, use it, close it. Raises ``ConfigError``, ``LogError``."""
    log = open_log(config.url, SystemClock(), rng=random.SystemRandom())
    await log.start()
    try:
        return await use(log)
    finally:
        await log.close()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory

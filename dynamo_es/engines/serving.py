"""What the processes of all engines have in common: run workers until told to stop, then drain them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from dynamo_es.runtime.core import RuntimeCore


async def run_until_stopped(
    stop: asyncio.Event, cores: Sequence[RuntimeCore], runs: Sequence[Coroutine[Any, Any, None]]
) -> None:
    """Await the runs of workers, each on its core, until ``stop`` is set or one of them ends; close the cores then.

    A worker that serves drains; one that has not started its core yet is cancelled.

    Raises:
        Exception: What the run that ended first broke down with; the others are stopped.
    """
    tasks = [asyncio.create_task(run, name="worker") for run in runs]
    stopped = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopped}:
            task.result()
    finally:
        stopped.cancel()
        for core, task in zip(cores, tasks, strict=True):
            if not core.started:
                task.cancel()
        await asyncio.gather(*(core.close() for core in cores))
        await asyncio.gather(*tasks, return_exceptions=True)

"""Tasks that run as long as their process, and which of them died: such a process looks well and is not.

What such a task does again and again may fail in ways it knows (a log that is away), and goes on. It dies of what
nobody thought of, and with it leases are not renewed or ended, or lag is not measured. The process is not ready from
then on and names the task in ``/health``. ``/live`` answers 503, too, since nothing but a restart mends it: an
orchestrator that probes it ends the process with SIGTERM, upon which streams are drained, and starts it again. Where
nothing probes, an alarm tells (``dynamo_es_background_tasks_died_total``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")
# Of those that are told one by one; each is in the log.
_MAX_TOLD = 20


@dataclass(frozen=True, slots=True)
class DeadTask:
    """A task that died. ``error``: the kind of it; its text, which may hold anything, is in the process's log only."""

    name: str
    error: str

    def __str__(self) -> str:
        return f"background task {self.name} died of {self.error}; see the log, and start the process again"


class BackgroundTasks:
    """Starts such tasks and notes which died. One for a process, handed to whoever has such a task."""

    def __init__(self) -> None:
        self.died: dict[str, int] = {}
        self._dead: list[DeadTask] = []

    @property
    def dead(self) -> Sequence[DeadTask]:
        """The first ones that died; not empty if any did."""
        return self._dead

    def spawn(self, work: Coroutine[Any, Any, T], name: str, kind: str = "") -> asyncio.Task[T]:
        """Run ``work`` in a task of the running loop. ``kind``: one of a small set, if there are many such names.

        Whoever calls it keeps the task and cancels it at the end, which is no death, nor is a return.
        """
        task = asyncio.get_running_loop().create_task(work, name=name)
        task.add_done_callback(partial(self._note, kind or name))
        return task

    def _note(self, kind: str, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            dead = DeadTask(task.get_name(), type(error).__name__)
            self.died[kind] = self.died.get(kind, 0) + 1
            if len(self._dead) < _MAX_TOLD:
                self._dead.append(dead)
            logger.critical("%s: this process is not ready any more", dead, exc_info=error)

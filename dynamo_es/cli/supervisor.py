"""Keeps several processes of the command ``dynamo-es`` running: starts again what ends, passes signals on, waits.

Children have a session of their own, so that a Ctrl-C reaches them once, through their parent; and they end with it
however it ends (``dynamo_es.cli.tether``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dynamo_es.errors import DynamoException

logger = logging.getLogger(__name__)

READY = b"ready "
"""How the line begins that a process prints when it serves (``announce_ready``)."""
_MISTAKE = 2
"""Exit code of a process that cannot start as it is configured."""


@dataclass(slots=True)
class Backoff:
    """Pauses before a process is started again: they double, until it has run for ``settled_s``. Pure."""

    first_s: float = 0.5
    longest_s: float = 30.0
    settled_s: float = 60.0
    _next_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._next_s = self.first_s

    def pause_after(self, ran_s: float) -> float:
        """Seconds to wait after a process that ran so long."""
        if ran_s >= self.settled_s:
            self._next_s = self.first_s
        pause, self._next_s = self._next_s, min(2 * self._next_s, self.longest_s)
        return pause


class FleetFailed(DynamoException):
    """A process could not start as it is configured; it said why itself.

    Attributes:
        code: Its exit code.
    """

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} cannot start; see its message above")
        self.code = code


class Supervisor:
    """Runs some commands until it is told to stop. One instance a fleet; belongs to one event loop.

    Args:
        commands: Arguments of ``dynamo-es``, one list a process.
        name: What a process is called in messages, ``frontend process``.
        stop_limit_s: How long the processes may take to end before they are killed.
        backoff: Makes the pauses of one process.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        name: str,
        *,
        stop_limit_s: float,
        backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        self._commands = commands
        self._name = name
        self._stop_limit_s = stop_limit_s
        self._backoff = backoff
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._ready: set[int] = set()
        self._all_ready = asyncio.Event()
        self._stopping = asyncio.Event()
        # Children read the one end; the kernel closes the other when this process ends, however it ends.
        self._tether, self._hold = os.pipe()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of those that run, by place among the commands."""
        return {place: process.pid for place, process in self._running.items()}

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Keep the processes running until ``stop`` is set, then end them. ``on_ready``: all of them serve.

        Raises:
            FleetFailed: One refuses its configuration, before all of them served. The others are ended.
        """
        keepers = [asyncio.create_task(self._keep(place)) for place in range(len(self._commands))]
        ready, stopped = asyncio.create_task(self._all_ready.wait()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([ready, stopped, *keepers], return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                on_ready()
                await asyncio.wait([stopped, *keepers], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (ready, stopped):
                task.cancel()
            await self._stop(keepers)
        for keeper in keepers:
            keeper.result()

    def send_signal(self, number: signal.Signals) -> None:
        """Pass a signal on to all that run."""
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    async def _keep(self, place: int) -> None:
        """Run one command again and again. Ends when the supervisor stops, or by ``FleetFailed``."""
        backoff, loop = self._backoff(), asyncio.get_running_loop()
        while not self._stopping.is_set():
            began = loop.time()
            process = await self._start(place)
            await self._listen(place, process)
            code = await process.wait()
            del self._running[place]
            if self._stopping.is_set():
                return
            if code == _MISTAKE and not self._all_ready.is_set():
                raise FleetFailed(f"{self._name} {place}", code)
            pause_s = backoff.pause_after(loop.time() - began)
            logger.error(
                "%s %d (pid %d) ended with code %d; it is started again in %g s",
                self._name, place, process.pid, code, pause_s,
            )  # fmt: skip
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)

    async def _start(self, place: int) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dynamo_es.cli.tether", *self._commands[place],
            stdin=self._tether, stdout=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._running[place] = process
        if self._stopping.is_set():  # the others were asked to end while this one started
            process.terminate()
        return process

    async def _listen(self, place: int, process: asyncio.subprocess.Process) -> None:
        """Wait for its readiness line, and pass on what else it prints, until it ends."""
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # longer than any line that means something here
                continue
            if not line:
                return
            if not line.startswith(READY):
                sys.stdout.write(line.decode(errors="replace"))
                sys.stdout.flush()
                continue
            self._ready.add(place)
            if len(self._ready) == len(self._commands):
                self._all_ready.set()

    async def _stop(self, keepers: Sequence[asyncio.Task[None]]) -> None:
        """Ask all to end, wait, and kill what is left."""
        self._stopping.set()
        self.send_signal(signal.SIGTERM)
        _, late = await asyncio.wait(keepers, timeout=self._stop_limit_s)
        if late:
            logger.error("%d of %s did not end within %g s: killed", len(late), self._name, self._stop_limit_s)
            self.send_signal(signal.SIGKILL)
        await asyncio.gather(*keepers, return_exceptions=True)
        for descriptor in (self._tether, self._hold):
            os.close(descriptor)

"""Child processes of a demo: started with their output in files, and never left behind."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dynamo_es.errors import DynamoException

_STOP_LIMIT_S = 15.0


class ChildProcesses:
    """Processes of the command ``dynamo-es``; ``<folder>/<name>.log`` has what each says."""

    def __init__(self, folder: Path, env: Mapping[str, str], inherited: Sequence[int] = ()) -> None:
        """``env``: their environment. ``inherited``: descriptors that every child holds open as long as it lives."""
        self.folder = folder
        self._env = dict(env)
        self._inherited = tuple(inherited)
        self._children: dict[str, asyncio.subprocess.Process] = {}
        # Children read the one end; the kernel closes the other when this process ends, however it ends.
        self._tether, self._hold = os.pipe()

    async def start(self, name: str, arguments: list[str]) -> None:
        """Start ``dynamo-es`` with these arguments. Not after ``stop_all``."""
        with (self.folder / f"{name}.log").open("wb") as output:
            self._children[name] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "dynamo_es.cli.tether", *arguments,
                stdout=output, stderr=output, stdin=self._tether, pass_fds=self._inherited, env=self._env,
            )  # fmt: skip

    def check_alive(self) -> None:
        """Raises ``DynamoException`` with the last words of a child that ended."""
        for name, child in self._children.items():
            if child.returncode is not None:
                raise DynamoException(f"{name} ended with code {child.returncode}: {self._last_line(name)}")

    async def wait_for_death(self, stop: asyncio.Event) -> None:
        """Wait until ``stop`` is set; raises ``DynamoException`` if a child ends before."""
        while not stop.is_set():
            self.check_alive()
            try:
                async with asyncio.timeout(0.5):
                    await stop.wait()
            except TimeoutError:
                continue

    async def stop_all(self) -> None:
        """Ask all to end, wait, and kill what is left. Safe to call twice."""
        running = [child for child in self._children.values() if child.returncode is None]
        for child in running:
            child.terminate()
        waits = [asyncio.create_task(child.wait()) for child in running]
        if waits:
            _, late = await asyncio.wait(waits, timeout=_STOP_LIMIT_S)
            for child in running:
                if child.returncode is None:
                    child.kill()
            await asyncio.gather(*late)
        self._children.clear()
        for descriptor in (self._tether, self._hold):
            if descriptor >= 0:
                os.close(descriptor)
        self._tether = self._hold = -1

    def _last_line(self, name: str) -> str:
        lines = (self.folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

"""Child processes of a demo: started with their output in files, and never left behind."""

from __future__ import annotations

import asyncio
import ctypes
import signal
import sys
from pathlib import Path

from dynamo_es.errors import DynamoException

_PR_SET_PDEATHSIG = 1
_STOP_LIMIT_S = 15.0


class ChildProcesses:
    """Processes of the command ``dynamo-es``; ``<folder>/<name>.log`` has what each says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._children: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, name: str, arguments: list[str]) -> None:
        """Start ``dynamo-es`` with these arguments."""
        with (self.folder / f"{name}.log").open("wb") as output:
            self._children[name] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "dynamo_es.cli.main", *arguments,
                stdout=output, stderr=output, stdin=asyncio.subprocess.DEVNULL,
                preexec_fn=_die_with_parent,
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
        """Ask all to end, wait, and kill what is left."""
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

    def _last_line(self, name: str) -> str:
        lines = (self.folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def _die_with_parent() -> None:
    """In the child, before exec: end when the parent does, even if that is killed (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

"""A fleet of real processes, started by the command line as a user would."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

MODEL = "e2e"
SHORT_LEASE = ["--lease-ttl", "2", "--heartbeat", "0.4"]


class Process:
    """One ``dynamo-es`` process; ``ready`` is what it said on standard output when it was up."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, folder: Path) -> None:
        self.name, self.process, self.folder = name, process, folder
        self.ready = ""

    async def wait_ready(self, timeout_s: float = 90.0) -> str:
        async with asyncio.timeout(timeout_s):
            line = (await self.process.stdout.readline()).decode().strip()
        assert line.startswith("ready"), f"{self.name}: {line!r}\n{self.log()}"
        self.ready = line.split(maxsplit=1)[1]
        return self.ready

    def log(self) -> str:
        return (self.folder / f"{self.name}.log").read_text(errors="replace")

    async def end(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 20.0) -> int:
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(timeout_s):
            return await self.process.wait()


class Fleet:
    """Starts processes on one log and ends them all. ``lease``: options of their leases."""

    def __init__(self, url: str, folder: Path, namespace: str = "dynamo", lease: Sequence[str] = SHORT_LEASE) -> None:
        self.url, self.folder, self.namespace, self.lease = url, folder, namespace, lease
        self.processes: list[Process] = []
        self.base = ""

    async def start(self, name: str, *arguments: str) -> Process:
        with (self.folder / f"{name}.log").open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "dynamo_es.cli.main", *arguments,
                "--log", self.url, "--topic-namespace", self.namespace, *self.lease,
                stdout=asyncio.subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        started = Process(name, process, self.folder)
        self.processes.append(started)
        return started

    async def frontend(self, *arguments: str, name: str = "frontend") -> Process:
        process = await self.start(
            name, "frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--router-mode", "kv",
            "--state-dir", str(self.folder / f"{name}-state"), "--state-flush-interval", "0.2", *arguments,
        )  # fmt: skip
        self.base = await process.wait_ready()
        return process

    async def worker(self, number: int, *arguments: str) -> Process:
        process = await self.start(
            f"worker-{number}", "worker", "mock", "--model-name", MODEL, "--speedup-ratio", "50", *arguments
        )
        await process.wait_ready()
        return process

    async def start_streams(self, *arguments: str, name: str = "streams") -> Process:
        """A worker of the stream processors' group, in the group when this returns."""
        with (self.folder / f"{name}.log").open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "dynamo_es.cli.main", "streams",
                "--log", self.url, "--topic-namespace", self.namespace,
                "--state-dir", str(self.folder / f"{name}-state"), *arguments,
                stdout=asyncio.subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        started = Process(name, process, self.folder)
        self.processes.append(started)
        await started.wait_ready()
        return started

    async def wait_workers(self, count: int, timeout_s: float = 20.0) -> None:
        async with httpx.AsyncClient() as http:

            async def workers() -> int:
                answer = await http.get(f"{self.base}/v1/models/{MODEL}/ready")
                if answer.status_code == 404:
                    return 0
                spaces = answer.json().get("namespaces", {})
                ready = answer.status_code == 200 or count == 0
                found = sum(kind["workers"] for space in spaces.values() for kind in space["worker_types"].values())
                return found if ready else -1

            async with asyncio.timeout(timeout_s):
                while await workers() != count:
                    await asyncio.sleep(0.02)

    async def close(self) -> None:
        for process in self.processes:
            if process.process.returncode is None:
                process.process.terminate()
        for process in self.processes:
            try:
                async with asyncio.timeout(60):
                    await process.process.wait()
            except TimeoutError:
                process.process.kill()
                await process.process.wait()
            process.process._transport.close()

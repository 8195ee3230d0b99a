"""More streams at a time than many a router survives, none of which ends by itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.fleet import MODEL, Fleet, Process

STREAMS = 2000
LIMIT = 500
DEADLINE_S = 120.0
# Connections to the worker come and go by themselves.
SPARE = 4
# A token in seconds, and more of them than the test lasts.
SLOW = ("--max-num-seqs", "4096", "--num-gpu-blocks-override", "100000", "--decode-speedup-ratio", "0.0002")
MAX_TOKENS = 4000
# A worker that starts two thousand streams on a busy machine is not taken for dead.
PATIENT = ("--lease-ttl", "60", "--heartbeat", "1")


@pytest.fixture(autouse=True)
def enough_files():
    """A socket for each stream, here and in the frontend, which inherits the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * STREAMS:
        pytest.skip(f"this user may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * STREAMS), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Streams:
    """Clients that ask and go on reading; ``statuses`` of those that have an answer, of streams with a token."""

    def __init__(self, base: str, count: int) -> None:
        address = urlsplit(base)
        self._address = (address.hostname, address.port)
        self.statuses: list[int] = []
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(count)]

    async def _ask(self, number: int) -> None:
        message = {"role": "user", "content": f"a story about number {number}"}
        body = {"model": MODEL, "stream": True, "max_tokens": MAX_TOKENS, "messages": [message]}
        text = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            writer.write(head + b"content-length: %d\r\n\r\n" % len(text) + text)
            status = int((await reader.readline()).split()[1])
            if status == 200:
                last = b""
                while b'"content":"' not in (line := await reader.readline()) or b'"content":""' in line:
                    assert line, f"the stream ended: {last!r}"
                    last = line if line.strip() else last
            self.statuses.append(status)
            while status == 200 and await reader.readline():
                pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def all_answered(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.statuses) < len(self._tasks):
                failed = [task.exception() for task in self._tasks if task.done() and task.exception()]
                assert not failed, failed[:3]
                await asyncio.sleep(0.05)

    async def hang_up(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def sockets(process: Process) -> int:
    """How many it has open. (Files of the log are opened as partitions get their first records.)"""
    found = 0
    for entry in Path(f"/proc/{process.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += str(entry.readlink()).startswith("socket:")
    return found


async def answers(base: str) -> None:
    """One more client is served, as soon as those that hung up have made room."""
    body = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "still there?"}]}
    async with httpx.AsyncClient(timeout=DEADLINE_S) as http, asyncio.timeout(DEADLINE_S):
        while (reply := await http.post(f"{base}/v1/chat/completions", json=body)).status_code == 503:
            await asyncio.sleep(0.1)
        assert reply.status_code == 200, reply.text
        assert (await http.get(f"{base}/health")).status_code == 200


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux tells them")
async def test_SCALE_06_two_thousand_slow_streams_are_served_or_refused_and_leave_nothing(tmp_path):
    """All of them have a token and none has ended when they are counted; a frontend with a limit refuses the rest."""
    fleet = Fleet(f"embedded://{tmp_path}/log", tmp_path, lease=PATIENT)
    try:
        frontend = await fleet.frontend()
        everybody = fleet.base
        limited = await fleet.frontend("--max-concurrent-requests", str(LIMIT), name="limited")
        some = fleet.base
        await fleet.worker(1, "--num-workers", "2", *SLOW)
        await fleet.wait_workers(2, timeout_s=DEADLINE_S)
        for process, base, served in ((frontend, everybody, STREAMS), (limited, some, LIMIT)):
            await answers(base)
            before = sockets(process)
            streams = Streams(base, STREAMS)
            try:
                await streams.all_answered()
                assert sorted(streams.statuses) == [200] * served + [503] * (STREAMS - served)
                assert sockets(process) >= before + served
            finally:
                await streams.hang_up()
            async with asyncio.timeout(DEADLINE_S):
                while sockets(process) > before + SPARE:
                    await asyncio.sleep(0.1)
            await answers(base)
            assert process.process.returncode is None
            assert "Traceback" not in process.log()
    finally:
        await fleet.close()

"""``--workers``: several frontend processes behind one port, and the one that keeps them running.

OPS-04: each has a state store of its own below ``--state-dir``.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynamo_es.cli.supervisor import FleetFailed, Supervisor
from tests.support.fleet import MODEL, Fleet
from tests.support.pages import Page

LIMIT_S = 60.0
TOKENS = 64
COUNT = 2

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="process tables are read from /proc")


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    started = Fleet(f"embedded://{tmp_path}/log", tmp_path)
    try:
        yield started
    finally:
        await started.close()


def running() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def children_of(pid: int) -> set[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else []
        except OSError:
            continue
        if fields and int(fields[1]) == pid and fields[0] != "Z":
            found.add(int(entry.name))
    return found


async def until(condition: Callable[[], Awaitable[Any]]) -> Any:
    async with asyncio.timeout(LIMIT_S):
        while not (found := await condition()):
            await asyncio.sleep(0.05)
    return found


async def ask(base: str, method: str, path: str, **more: Any) -> httpx.Response:
    """By a connection of its own, so that any process may get it."""
    async with httpx.AsyncClient(base_url=base, timeout=LIMIT_S) as http:
        return await http.request(method, path, **more)


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, **more}


async def served_by_each(base: str) -> bool:
    """Send a request; whether every process has answered one by now."""
    answer = await ask(base, "POST", "/v1/chat/completions", json=chat())
    assert answer.status_code in (200, 404, 503), answer.text  # it may be starting, or not know the worker yet
    page = Page((await ask(base, "GET", "/metrics")).text)
    counted = page.labels_of("dynamo_frontend_requests_total")
    return all(
        any({f"frontend_process={index}", "status=success"} <= labels for labels in counted) for index in range(COUNT)
    )


async def limits_of(base: str) -> set[int | None]:
    """The thresholds that several connections are told."""
    answers = [await ask(base, "GET", "/busy_threshold") for _ in range(12)]
    return {entry["active_prefill_tokens_threshold"] for answer in answers for entry in answer.json()["thresholds"]}


async def test_processes_share_a_port_and_one_that_dies_comes_back(fleet: Fleet, tmp_path: Path) -> None:
    frontend = await fleet.start(
        "frontend", "frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--router-mode", "kv",
        "--workers", str(COUNT), "--state-dir", str(tmp_path / "state"), "--http-graceful-shutdown-timeout", "60",
    )  # fmt: skip
    base = await frontend.wait_ready(LIMIT_S)
    await fleet.worker(1, "--speedup-ratio", "1")
    await until(lambda: served_by_each(base))
    assert {folder.name for folder in (tmp_path / "state").iterdir()} == {"process-0", "process-1"}

    # What an operator tells one of them, all of them know.
    limit = {"model": MODEL, "active_prefill_tokens_threshold": 77_000}
    assert (await ask(base, "POST", "/busy_threshold", json=limit)).status_code == 200
    assert await limits_of(base) == {77_000}

    # One is killed: the port goes on, and its successor knows the thresholds, too.
    before = children_of(frontend.process.pid)
    assert len(before) == COUNT
    victim = min(before)
    os.kill(victim, signal.SIGKILL)

    async def replaced() -> bool:
        return len(children_of(frontend.process.pid) - {victim}) == COUNT

    async def agree() -> bool:
        return await limits_of(base) == {77_000}

    await until(replaced)
    await until(lambda: served_by_each(base))
    await until(agree)
    assert f"(pid {victim}) ended with code -9" in frontend.log()

    # It ends in order: a stream that runs is finished, the processes are gone, the exit code is 0.
    async with (
        httpx.AsyncClient(base_url=base, timeout=LIMIT_S) as http,
        http.stream("POST", "/v1/chat/completions", json=chat(stream=True, max_tokens=TOKENS)) as stream,
    ):
        assert stream.status_code == 200
        lines = stream.aiter_lines()
        await anext(lines)
        left = children_of(frontend.process.pid)
        frontend.process.send_signal(signal.SIGTERM)
        said = [line async for line in lines if line]
    assert said[-1] == "data: [DONE]"
    assert not any('"error"' in line for line in said)
    async with asyncio.timeout(LIMIT_S):
        assert await frontend.process.wait() == 0
    assert not left & running()


async def test_a_process_that_refuses_its_options_ends_them_all(capfd: pytest.CaptureFixture[str]) -> None:
    supervisor = Supervisor([["config", "--no-such"]] * 2, "process", stop_limit_s=LIMIT_S)
    with pytest.raises(FleetFailed, match=r"process \d cannot start; see its message above") as caught:
        await supervisor.run(asyncio.Event(), lambda: pytest.fail("nothing serves"))
    assert caught.value.code == 2
    assert supervisor.pids == {}
    assert "unrecognized arguments: --no-such" in capfd.readouterr().err

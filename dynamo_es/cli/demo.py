"""``dynamo-es demo``: a fleet on this machine that answers chats, and shows why each went where it went."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dynamo_es.cli.children import ChildProcesses
from dynamo_es.cli.demo_client import DemoClient, read_models
from dynamo_es.cli.process import run_async, stop_on_signals
from dynamo_es.clock import SystemClock
from dynamo_es.errors import DynamoException
from dynamo_es.log.open import open_log

_SYSTEM = (
    "You are the concierge of a small observatory. Visitors ask about the night sky, the telescopes and the café. "
    "Answer in one short paragraph, kindly, and never promise clear weather."
)
_QUESTIONS = (
    "Which planet is up tonight?",
    "How large is the main telescope?",
    "Can my children look through it?",
    "Which planet is up tonight, and where do I look?",
    "Is the café open after midnight?",
)
_START_LIMIT_S = 60.0


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "demo", help="start one frontend and four mock workers on an embedded log, and send a few chats"
    )
    parser.add_argument("--workers", type=int, default=4, help="mock workers (default 4)")
    parser.add_argument("--http-port", type=int, default=8000, help="default 8000, or a free port if that is in use")
    parser.add_argument(
        "--dir", default=None, help="folder for log and state; default: a temporary one, removed at the end"
    )
    parser.add_argument("--once", action="store_true", help="end after the chats instead of waiting for Ctrl-C")
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Run until Ctrl-C. Leaves no process behind."""
    folder = Path(flags.dir) if flags.dir is not None else Path(tempfile.mkdtemp(prefix="dynamo-es-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return run_async(_demo(folder.resolve(), flags))
    finally:
        if flags.dir is None:
            shutil.rmtree(folder, ignore_errors=True)


async def _demo(folder: Path, flags: argparse.Namespace) -> int:
    stop = asyncio.Event()
    stop_on_signals(stop)
    started = time.monotonic()
    url = f"embedded://{folder}/log"
    children = ChildProcesses(folder)
    print(f"log      {url}", flush=True)
    try:
        main = asyncio.create_task(_run_fleet(children, url, folder, flags, stop, started))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((main, stopped), return_when=asyncio.FIRST_COMPLETED)
        main.cancel()
        result = (await asyncio.gather(main, return_exceptions=True))[0]
        stopped.cancel()
        if isinstance(result, DynamoException):
            raise result
        if isinstance(result, Exception):
            raise DynamoException(f"the demo failed: {type(result).__name__}: {result}") from result
    finally:
        print("stopping the fleet", flush=True)
        await children.stop_all()
    return 0


async def _run_fleet(
    children: ChildProcesses, url: str, folder: Path, flags: argparse.Namespace, stop: asyncio.Event, started: float
) -> None:
    port = _free_port(flags.http_port)
    log_flags = ["--log", url]
    await children.start(
        "frontend",
        ["frontend", *log_flags, "--http-host", "127.0.0.1", "--http-port", str(port), "--router-mode", "kv",
         "--state-dir", str(folder / "frontend-state")],
    )  # fmt: skip
    for number in range(1, flags.workers + 1):
        await children.start(
            f"worker-{number}", ["worker", "mock", *log_flags, "--model-name", "demo", "--speedup-ratio", "5"]
        )
    base = f"http://127.0.0.1:{port}"
    await _wait_ready(base, flags.workers, children)
    print(f"frontend {base}  (POST {base}/v1/chat/completions, GET {base}/health, {base}/metrics, {base}/docs)")
    print(
        f"workers  {flags.workers} mock workers serve the model 'demo', up after {time.monotonic() - started:.1f} s\n"
    )
    log = open_log(url, SystemClock(), rng=random.SystemRandom())
    await log.start()
    try:
        client = DemoClient(base, log)
        await client.start()
        for number, question in enumerate(_QUESTIONS, 1):
            print(await client.chat(number, _SYSTEM, question), flush=True)
            if number == 1:
                print(f"         first answer after {time.monotonic() - started:.1f} s", flush=True)
    finally:
        await log.close()
    print(_hints(base, url), flush=True)
    if not flags.once:
        print("The fleet stays up until Ctrl-C.", flush=True)
        await children.wait_for_death(stop)


async def _wait_ready(base: str, workers: int, children: ChildProcesses) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    shown = -1
    while True:
        children.check_alive()
        found = await asyncio.to_thread(read_models, base, "demo")
        if found is not None and found != shown:
            print(f"starting {found} of {workers} workers registered", flush=True)
            shown = found
        if found is not None and found >= workers:
            return
        if time.monotonic() > deadline:
            raise DynamoException(f"the fleet is not up after {_START_LIMIT_S:g} s; see the logs in {children.folder}")
        await asyncio.sleep(0.05)


def _free_port(wanted: int) -> int:
    """The wanted port if it is free, else any."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise DynamoException("no free port on 127.0.0.1")


def _hints(base: str, url: str) -> str:
    command = "dynamo-es" if shutil.which("dynamo-es") else f"{os.path.relpath(sys.executable)} -m dynamo_es.cli.main"
    body = '{"model":"demo","stream":true,"messages":[{"role":"user","content":"Hello"}],"max_tokens":40}'
    return (
        f"\nTry it yourself:\n"
        f"  curl -N {base}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n"
        f"  {command} topics list --log {url}\n"
        f"  {command} topics read requests --log {url} --max-records 3\n"
        f"  {command} state show --log {url}\n"
    )

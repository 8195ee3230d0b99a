"""``dynamo-es demo``: a fleet on this machine that answers chats, and shows why each went where it went."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dynamo_es.cli.children import ChildProcesses
from dynamo_es.cli.demo_client import DemoClient, read_models
from dynamo_es.cli.process import run_async, stop_on_signals
from dynamo_es.cli.scratch import remove_abandoned, scratch_folder
from dynamo_es.clock import SystemClock
from dynamo_es.config.command_options import DemoConfig
from dynamo_es.config.options import add_flags, load
from dynamo_es.errors import ConfigError, DynamoException
from dynamo_es.folders import why_not_made
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
    add_flags(parser, DemoConfig)
    parser.add_argument("--once", action="store_true", help="end after the chats instead of waiting for Ctrl-C")
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Run until Ctrl-C. Leaves no process behind, and no folder but the one that was named."""
    config = load(DemoConfig, flags, os.environ)
    with contextlib.ExitStack() as stack:
        folder, inherited = _kept_folder(config.folder) if config.folder is not None else _new_folder(stack)
        # The demo is the same whatever this shell has set for other processes.
        env = {name: value for name, value in os.environ.items() if not name.startswith("DYN_") or name == "DYN_LOG"}
        children = ChildProcesses(folder, env, inherited)
        return run_async(_demo(children, config, flags.once))


def _kept_folder(name: str) -> tuple[Path, tuple[int, ...]]:
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--dir {name} cannot be used: {why_not_made(folder, error)}; choose another folder"
        ) from error
    return folder.resolve(), ()


def _new_folder(stack: contextlib.ExitStack) -> tuple[Path, tuple[int, ...]]:
    try:
        parent = Path(tempfile.gettempdir())
        for abandoned in remove_abandoned(parent):
            print(f"removed  {abandoned}, left behind by a demo that was killed")
        scratch = stack.enter_context(scratch_folder(parent))
    except OSError as error:
        raise ConfigError(f"no temporary folder can be made ({error}); name a folder with --dir") from error
    return scratch.path.resolve(), (scratch.lock,)


async def _demo(children: ChildProcesses, config: DemoConfig, once: bool) -> int:
    stop = asyncio.Event()
    stop_on_signals(stop)
    started = time.monotonic()
    url = f"embedded://{quote(str(children.folder))}/log"
    print(f"log      {url}", flush=True)
    try:
        main = asyncio.create_task(_run_fleet(children, url, config, stop, started, once))
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
    children: ChildProcesses, url: str, config: DemoConfig, stop: asyncio.Event, started: float, once: bool
) -> None:
    port = _free_port(config.http_port)
    log_flags = ["--log", url]
    await children.start(
        "frontend",
        ["frontend", *log_flags, "--http-host", "127.0.0.1", "--http-port", str(port), "--router-mode", "kv",
         "--state-dir", str(children.folder / "frontend-state")],
    )  # fmt: skip
    for number in range(1, config.workers + 1):
        await children.start(
            f"worker-{number}", ["worker", "mock", *log_flags, "--model-name", "demo", "--speedup-ratio", "5"]
        )
    base = f"http://127.0.0.1:{port}"
    await _wait_ready(base, config.workers, children)
    print(f"frontend {base}  (POST {base}/v1/chat/completions, GET {base}/health, {base}/metrics, {base}/docs)")
    print(
        f"workers  {config.workers} mock workers serve the model 'demo', up after {time.monotonic() - started:.1f} s\n"
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
    if not once:
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

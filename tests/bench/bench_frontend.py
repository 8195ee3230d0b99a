"""Requests and streamed tokens per second of the HTTP frontend alone: engine in the same process; load from wrk.

``empty`` is a raw ASGI route on the same server that answers a fixed body: what uvicorn and wrk cost without us; so is
``empty stream``, which sends chunks of a usual size. Prompts differ in their user message; the system message that the
chat template puts before it does not. Tokens come all at once, or ``by turns``: each stream gives way to the others
after every token, so that each token costs a wake-up and a write of its own, as with an engine that is the slower one.
The server runs on the first core, wrk on the second.

``python -m tests.bench.bench_frontend [--model DIR] [--seconds 5] [--rounds 5] [--connections 32]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MODEL = Path(__file__).parents[1] / "data" / "models" / "smollm2-135m-instruct"
PROMPT = "NUMBER: Tell me in one sentence what a log-structured merge tree is and why a router may want one of them."
TOKENS = 512
"""Of a long stream."""
CHUNK = b"data: " + b" " * 192 + b"\n\n"


class InstantEngine:
    """Answers with max_tokens tokens, one a frame; all frames of a stream are ready at once."""

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncGenerator[list[dict[str, Any]], None]:
        count = request["stop_conditions"]["max_tokens"]
        frames = [{"token_ids": [1000 + place], "finish_reason": None} for place in range(count)]
        frames[-1]["finish_reason"] = "length"
        for one in frames:
            yield [one]


class TurnEngine:
    """The same, but other requests have their turn after each frame."""

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncGenerator[list[dict[str, Any]], None]:
        for left in reversed(range(request["stop_conditions"]["max_tokens"])):
            await asyncio.sleep(0)
            yield [{"token_ids": [1000 + left], "finish_reason": None if left else "length"}]


class WithEmptyRoute:
    """The application, and two routes that do nothing."""

    def __init__(self, app: Any) -> None:
        self.service = app.service
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path")
        if path == "/empty-stream":
            await self._stream(receive, send)
            return
        if path != "/empty":
            await self._app(scope, receive, send)
            return
        await receive()
        headers = ((b"content-type", b"application/json"), (b"content-length", b"300"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b" " * 300, "more_body": False})

    async def _stream(self, receive: Any, send: Any) -> None:
        await receive()
        await send(
            {"type": "http.response.start", "status": 200, "headers": ((b"content-type", b"text/event-stream"),)}
        )
        for left in reversed(range(TOKENS)):
            await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": CHUNK, "more_body": bool(left)})


def pin(core: int) -> None:
    if len(os.sched_getaffinity(0)) > 1:
        os.sched_setaffinity(0, {core})


async def serve_until_signal(model_dir: str) -> None:
    from prometheus_client import CollectorRegistry

    from dynamo_es.cli.process import settle_heap
    from dynamo_es.clock import SystemClock
    from dynamo_es.config.tree import FrontendConfig
    from dynamo_es.frontend.app import build_app
    from dynamo_es.frontend.contracts import ServedModel
    from dynamo_es.frontend.metrics import FrontendMetrics
    from dynamo_es.frontend.server import serve
    from dynamo_es.frontend.tokenizer_files import load_tokenizer
    from tests.unit.frontend.fakes import FixedDirectory, FixedHealth, card

    tokenizer, renderer = load_tokenizer(model_dir)
    models = {
        name: ServedModel(name, card(name, context_length=8192), tokenizer, renderer, engine, 0)
        for name, engine in (("m", InstantEngine()), ("turns", TurnEngine()))
    }
    config = FrontendConfig(http_host="127.0.0.1", http_port=0)
    with ThreadPoolExecutor(2) as executor:
        metrics = FrontendMetrics(CollectorRegistry())
        app = build_app(config, FixedDirectory(models), FixedHealth(), metrics, SystemClock(), executor)
        server = await serve(WithEmptyRoute(app), config)
        settle_heap()
        print(server.port, flush=True)
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await stop.wait()
        await server.shutdown()


def wrk_script(directory: Path, body: dict[str, Any], distinct: int) -> Path:
    """Every request has another number in its prompt; after ``distinct`` of them they come again."""
    path = directory / "post.lua"
    head, tail = json.dumps(body).split("NUMBER")
    path.write_text(
        f"""local head, tail = {json.dumps(head)}, {json.dumps(tail)}
local count = 0
local headers = {{["Content-Type"] = "application/json"}}
function request()
  count = count % {distinct} + 1
  return wrk.format("POST", nil, headers, head .. count .. tail)
end
""",
        encoding="utf-8",
    )
    return path


def measure(
    port: int, path: str, body: dict[str, Any], seconds: int, connections: int, distinct: int
) -> tuple[float, str]:
    wrk = shutil.which("wrk")
    if wrk is None:
        sys.exit("wrk is needed (apt-get install wrk)")
    with tempfile.TemporaryDirectory() as directory:
        script = wrk_script(Path(directory), body, distinct)
        command = [wrk, "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "-s", str(script)]
        url = f"http://127.0.0.1:{port}{path}"
        text = subprocess.run(
            [*command, url], capture_output=True, text=True, check=True, preexec_fn=lambda: pin(1)
        ).stdout
    if "Non-2xx" in text:
        sys.exit(text)
    rate = float(re.search(r"Requests/sec:\s+([\d.]+)", text).group(1))
    return rate, re.search(r"99%\s+(\S+)", text).group(1)


def main() -> list[tuple[str, float, str]]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--distinct", type=int, default=1_000_000, help="different prompts")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--serve", action="store_true")
    options = parser.parse_args()
    if options.serve:
        import uvloop

        pin(0)
        uvloop.run(serve_until_signal(options.model))
        return []
    command = [sys.executable, "-m", "tests.bench.bench_frontend", "--serve", "--model", options.model]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        port = int(server.stdout.readline())
        base = {"model": "m", "messages": [{"role": "user", "content": PROMPT}]}
        chat = "/v1/chat/completions"
        long = {**base, "max_tokens": TOKENS, "stream": True}
        cases = {
            "empty": ("/empty", base, 0),
            "unary, max_tokens 1": (chat, {**base, "max_tokens": 1}, 0),
            "unary, max_tokens 16": (chat, {**base, "max_tokens": 16}, 0),
            "stream, max_tokens 1": (chat, {**base, "max_tokens": 1, "stream": True}, 0),
            "stream, max_tokens 16": (chat, {**base, "max_tokens": 16, "stream": True}, 0),
            "empty stream, by turns": ("/empty-stream", base, TOKENS),
            f"stream, max_tokens {TOKENS}": (chat, long, TOKENS),
            f"stream, max_tokens {TOKENS}, by turns": (chat, {**long, "model": "turns"}, TOKENS),
        }
        if options.only:
            cases = {name: case for name, case in cases.items() if options.only in name}
        found: dict[str, list[tuple[float, str]]] = {name: [] for name in cases}
        for number in range(options.rounds + 1):
            for name, (path, body, _) in cases.items():
                result = measure(
                    port, path, body, options.seconds if number else 1, options.connections, options.distinct
                )
                if number:
                    found[name].append(result)
        rows = []
        for name, results in found.items():
            tokens = cases[name][2]
            unit = "tokens/s" if tokens else "requests/s"
            rates = sorted(rate * (tokens or 1) for rate, _ in results)
            print(
                f"{name}: median {statistics.median(rates):,.0f} {unit} "
                f"({rates[0]:,.0f} to {rates[-1]:,.0f}), p99 {sorted(late for _, late in results)[-1]}"
            )
            rows += [
                (f"{name}, median of {len(rates)}", statistics.median(rates), unit),
                (f"{name}, smallest", rates[0], unit),
                (f"{name}, largest", rates[-1], unit),
            ]
        return rows
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(10)


if __name__ == "__main__":
    main()

"""Short requests and streamed tokens a second with one and with two frontend processes (``--workers``).

The frontend's own command with KV routing, a process with four mock workers that take no time, and wrk, all free to run
on any core. On two cores, which the load and the workers use as well, a second process cannot bring much; what tells
how it would scale is the processor time of a request, of all frontend processes together, which should stay the same.

``python -m tests.bench.bench_workers [--workers 1,2] [--seconds 5] [--rounds 3] [--connections 32]``
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench.bench_frontend import PROMPT, wrk_script
from tests.bench.bench_many_streams import Shape, fleet
from tests.bench.spread import Row, rounds
from tests.bench.stream_engines import NAME

TOKENS = 128
"""Of a stream."""
MESSAGES = [{"role": "user", "content": PROMPT}]
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "short requests": ({"model": NAME, "messages": MESSAGES, "max_tokens": 1}, 1),
    "streamed tokens": ({"model": NAME, "messages": MESSAGES, "max_tokens": TOKENS, "stream": True}, TOKENS),
}
"""Bodies, and what one request counts."""


def press(base: str, body: dict[str, Any], seconds: int, connections: int) -> tuple[int, float]:
    """Requests that were answered, and requests a second."""
    wrk = shutil.which("wrk")
    if wrk is None:
        sys.exit("wrk is needed (apt-get install wrk)")
    with tempfile.TemporaryDirectory() as folder:
        script = wrk_script(Path(folder), body, 1_000_000)
        command = [wrk, "-t1", f"-c{connections}", f"-d{seconds}s", "-s", str(script), f"{base}/v1/chat/completions"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rate, count = re.search(r"Requests/sec:\s+([\d.]+)", text), re.search(r"(\d+) requests in", text)
    if "Non-2xx" in text or rate is None or count is None:
        sys.exit(text)
    return int(count.group(1)), float(rate.group(1))


def measure(shape: Shape, workers: int, options: argparse.Namespace) -> list[Row]:
    """All cases in turns, some rounds of each after a short one that does not count."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    frontend = shape.processes["frontend"]
    for number in range(options.rounds + 1):
        for name, (body, worth) in CASES.items():
            spent = frontend.processor_s()
            count, rate = press(shape.base, body, options.seconds if number else 2, options.connections)
            if number:
                found[name].append((rate * worth, 1e6 * (frontend.processor_s() - spent) / (count * worth)))
    rows: list[Row] = []
    for name, pairs in found.items():
        rates, times = zip(*pairs, strict=True)
        rows += rounds(f"--workers {workers}: {name}", rates, "1/s")
        rows += rounds(f"--workers {workers}: {name}, frontend's processor time of one", times, "us")
    return rows


def main() -> list[Row]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=32)
    options = parser.parse_args()
    rows: list[Row] = []
    for workers in map(int, options.workers.split(",")):
        with fleet(0, "--workers", str(workers), core=None) as shape:
            rows += measure(shape, workers, options)
    for what, value, unit in rows:
        print(f"{what:<88} {value:12,.1f} {unit}")
    return rows


if __name__ == "__main__":
    main()

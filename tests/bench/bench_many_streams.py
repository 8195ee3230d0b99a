"""1,000 streams at a time on one frontend for a minute, a tenth of them cut by the client; then again.

How long after an engine made a token it is at the client, by the machine's monotonic clock; what is left of the streams
afterwards; and whether the second minute takes more memory than the first. ``alone``: engines in the frontend's
process. ``fleet``: the frontend's own command with KV routing, and a process with four mock workers. Every stream gets
15 tokens a second. The frontend runs on the first core, load and workers on the second.

``python -m tests.bench.bench_many_streams [--streams 1000] [--seconds 60] [--rate 15] [--rounds 2] [--only alone]``
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tests.bench.bench_frontend import pin
from tests.bench.spread import Row, latencies
from tests.bench.stream_engines import NAME
from tests.support.pages import Page
from tests.support.stream_load import StreamLoad

MAX_TOKENS = 300
SETTLE_S = 30.0
ALLOWED_GROWTH = 0.05
FULL = "full"
"""Among the requests of the load's file: from when to when all streams were open."""
LASTING = ("tasks", "sockets")
"""What a process has without any stream, too."""


class Child:
    """A process of ``stream_engines`` or of the command line; what it says when it is ready."""

    def __init__(self, core: int, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: pin(core),
        )
        line = self._line()
        assert line.startswith("ready"), line
        self.base = line.removeprefix("ready").strip()

    def report(self, file: str = "-") -> dict[str, int]:
        """See ``stream_engines``."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{file}\n")
        self.process.stdin.flush()
        result: dict[str, int] = json.loads(self._line())
        return result

    def end(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=30)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def generate_load(base: str, streams: int, seconds: float, seed: int, file: str) -> int:
    """The load's own process: writes when tokens came; tells what went wrong."""
    import uvloop

    rise()
    address = urlsplit(base)
    load = StreamLoad(
        str(address.hostname), int(address.port or 80), NAME, streams=streams, max_tokens=MAX_TOKENS,
        rng=random.Random(seed),
    )  # fmt: skip
    uvloop.run(load.run(seconds, ramp_s=min(15.0, seconds / 3)))
    faults = load.faults()
    for fault in faults[:5]:
        print(fault, file=sys.stderr)
    came = {told.request_id: told.arrivals.tobytes() for told in load.told}
    Path(file).write_bytes(msgspec.msgpack.encode({FULL: array("d", load.full).tobytes()} | came))
    print(f"{len(load.told)} requests, {sum(told.cut_after is not None for told in load.told)} of them cut")
    return len(faults)


def sockets_of(child: Child) -> int:
    """Open sockets of a process. Files do not count: a log opens those of a topic when it is first used."""
    links = []
    for entry in Path(f"/proc/{child.process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(entry.readlink()))
    return sum(link.startswith("socket:") for link in links)


def rise() -> None:
    """Go before workers on the same core, if this process may: what is late should be the server, not its client."""
    with contextlib.suppress(OSError):
        policy = os.sched_getscheduler(0)
        if policy in (os.SCHED_RR, os.SCHED_FIFO):
            priority = os.sched_getparam(0).sched_priority
            os.sched_setscheduler(0, policy, os.sched_param(priority + 1))
        else:
            os.nice(-5)


def read_times(file: Path) -> dict[str, array[float]]:
    return {key: array("d", data) for key, data in msgspec.msgpack.decode(file.read_bytes()).items()}


def overheads_ms(made: dict[str, array[float]], came: dict[str, array[float]]) -> list[float]:
    """Of every token that was made while all streams were open."""
    begin, end = came.pop(FULL)
    return [
        1000 * (there - here)
        for key, arrivals in came.items()
        for here, there in zip(made[key], arrivals, strict=False)
        if begin <= here < end
    ]


def page_counts(base: str) -> dict[str, int]:
    """What a frontend's metrics page says of requests and of the process."""
    with urllib.request.urlopen(f"{base}/metrics") as answer:
        page = Page(answer.read().decode())

    def total(name: str) -> int:
        return int(sum(value for (found, _), value in page.samples.items() if found == name))

    return {
        "active": total("dynamo_frontend_active_requests"),
        "inflight": total("dynamo_frontend_inflight_requests"),
        "routed": total("dynamo_es_routing_active_requests"),
        "booked": total("dynamo_es_open_bookings"),
        "resident_bytes": total("process_resident_memory_bytes"),
    }


def settled(look: Callable[[], dict[str, int]], before: dict[str, int]) -> dict[str, int]:
    """What there is when the streams are gone: no more tasks and sockets than ``before``, if that says how many."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        now = look()
        left = {
            key: count
            for key, count in now.items()
            if key != "resident_bytes" and count > (before.get(key, count) if key.endswith(LASTING) else 0)
        }
        if not left:
            return now
        if time.monotonic() > deadline:
            sys.exit(f"left after the streams are over: {left}; before them: {before}")
        time.sleep(0.2)


@contextlib.contextmanager
def alone(rate: float) -> Iterator[tuple[str, Child, Callable[[], dict[str, int]]]]:
    """Address, who knows when tokens were made, and what there is."""
    server = Child(0, "tests.bench.stream_engines", "alone", str(rate))
    try:
        yield server.base, server, lambda: server.report() | {"sockets": sockets_of(server)}
    finally:
        server.end()


@contextlib.contextmanager
def fleet(rate: float) -> Iterator[tuple[str, Child, Callable[[], dict[str, int]]]]:
    """The same."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        log = f"embedded://{folder}/log"
        workers = Child(1, "tests.bench.stream_engines", "workers", str(rate), log)
        stack.callback(workers.end)
        frontend = Child(
            0, "dynamo_es.cli.main", "frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--log", log,
            "--router-mode", "kv", "--state-dir", f"{folder}/state",
        )  # fmt: skip
        stack.callback(frontend.end)
        wait_ready(frontend.base)

        def look() -> dict[str, int]:
            theirs = {f"workers' {key}": value for key, value in workers.report().items() if key != "resident_bytes"}
            theirs["workers' sockets"] = sockets_of(workers)
            return page_counts(frontend.base) | {"sockets": sockets_of(frontend)} | theirs

        yield frontend.base, workers, look


def wait_ready(base: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{base}/v1/models/{NAME}/ready"):
            return
        if time.monotonic() > deadline:
            sys.exit("the workers are not there")
        time.sleep(0.1)


def run_shape(name: str, options: argparse.Namespace) -> list[Row]:
    """Some rounds of load on one shape."""
    shape: Any = {"alone": alone, "fleet": fleet}[name]
    rows: list[Row] = []
    with shape(options.rate) as (base, engines, look), tempfile.TemporaryDirectory() as folder:
        came, made = Path(folder) / "came", Path(folder) / "made"
        # A first short round loads what is loaded once: connections to workers, templates, code.
        rounds = [(20, 3.0), *[(options.streams, options.seconds)] * options.rounds]
        before: dict[str, int] = {}
        sizes: list[int] = []
        for number, (streams, seconds) in enumerate(rounds):
            subprocess.run(
                [sys.executable, "-m", "tests.bench.bench_many_streams", "--load", base, "--streams", str(streams),
                 "--seconds", str(seconds), "--seed", str(number), "--file", str(came)],
                check=True, preexec_fn=lambda: pin(1),
            )  # fmt: skip
            engines.report(str(made))
            now = settled(look, before)
            if not number:
                before = {key: count for key, count in now.items() if key.endswith(LASTING)}
                continue
            sizes.append(now["resident_bytes"])
            late = overheads_ms(read_times(made), read_times(came))
            rows.append((f"{name}, round {number}: tokens a second at the client", len(late) / seconds, "tokens/s"))
            rows += latencies(f"{name}, round {number}: from engine to client", late, "ms")
            rows.append((f"{name}, round {number}: memory after it", sizes[-1] / 2**20, "MiB"))
        growth = sizes[-1] / sizes[0] - 1
        rows.append((f"{name}: growth of memory from the first round to the last", 100 * growth, "%"))
        if growth > ALLOWED_GROWTH:
            sys.exit(f"{name}: memory grew by {100 * growth:.1f} %: {sizes}")
    return rows


def main() -> list[Row]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rate", type=float, default=15, help="tokens a second and stream")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", choices=("", "alone", "fleet"))
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        sys.exit(int(generate_load(options.load, options.streams, options.seconds, options.seed, options.file) > 0))
    shapes = [options.only] if options.only else ["alone", "fleet"]
    rows = [row for name in shapes for row in run_shape(name, options)]
    for what, value, unit in rows:
        print(f"{what:<70} {value:12,.2f} {unit}")
    return rows


if __name__ == "__main__":
    main()

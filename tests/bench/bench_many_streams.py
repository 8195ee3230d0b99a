"""1,000 streams at a time on one frontend for a minute, a tenth of them cut by the client; then again.

How long after an engine made a token it is at the client, by the machine's monotonic clock; what is left of the streams
afterwards; and whether the second minute takes more memory than the first. ``alone``: engines in the frontend's
process. ``fleet``: the frontend's own command with KV routing, and a process with four mock workers. ``floor``: only
sends, by a server that does nothing else: less than that the machine and this load do not allow. Every stream gets
15 tokens a second. The server runs on the first core, load and workers on the second, so a token has to wait there
for others to be made and read: when it is *at* the client's socket is told apart from when the client has *read* it.

``python -m tests.bench.bench_many_streams [--streams 1000] [--seconds 60] [--rate 15] [--rounds 2] [--only alone]``
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from tests.bench.bench_frontend import pin
from tests.bench.spread import Row, latencies
from tests.bench.stream_engines import NAME
from tests.support.pages import Page
from tests.support.stream_load import StreamLoad

MAX_TOKENS = 300
SETTLE_S = 30.0
ASKED = 25
ALLOWED_GROWTH = 0.05
FULL = "full"
"""Among the requests of the load's file: from when to when all streams were open."""
READ, LANDED = "arrivals", "landings"
"""Times of ``Told``: when the client has read a token, and when it was at the client's socket."""
LASTING = ("tasks", "sockets")
"""What a process has without any stream, too."""


class Child:
    """A process of ``stream_engines`` or of the command line; what it says when it is ready."""

    def __init__(self, core: int | None, *arguments: str) -> None:
        """``core``: where it runs; None: anywhere."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=None if core is None else lambda: pin(core),
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

    def processor_s(self) -> float:
        """Seconds of processor time that it and its child processes took so far."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if self.process.pid in (int(fields[1]), int(stat.parent.name)):
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=30)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def generate_load(base: str, streams: int, seconds: float, seed: int, file: str) -> int:
    """The load's own process: writes when tokens came; tells what went wrong."""
    import uvloop

    address = urlsplit(base)
    load = StreamLoad(
        str(address.hostname), int(address.port or 80), NAME, streams=streams, max_tokens=MAX_TOKENS,
        rng=random.Random(seed),
    )  # fmt: skip
    # A collection walks all that was noted, for tens of milliseconds: they would be taken for the server's.
    gc.disable()
    uvloop.run(load.run(seconds, ramp_s=min(15.0, seconds / 3)))
    faults = load.faults()
    for fault in faults[:5]:
        print(fault, file=sys.stderr)
    for name in (READ, LANDED):
        came = {told.request_id: getattr(told, name).tobytes() for told in load.told}
        Path(f"{file}.{name}").write_bytes(msgspec.msgpack.encode({FULL: array("d", load.full).tobytes()} | came))
    print(f"{len(load.told)} requests, {sum(told.cut_after is not None for told in load.told)} of them cut")
    return len(faults)


def sockets_of(child: Child) -> int:
    """Open sockets of a process. Files do not count: a log opens those of a topic when it is first used."""
    links = []
    for entry in Path(f"/proc/{child.process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(entry.readlink()))
    return sum(link.startswith("socket:") for link in links)


def read_times(file: Path) -> dict[str, array[float]]:
    return {key: array("d", data) for key, data in msgspec.msgpack.decode(file.read_bytes()).items()}


def overheads_ms(made: dict[str, array[float]], came: dict[str, array[float]]) -> list[float]:
    """Of every token that was made while all streams were open."""
    begin, end = came[FULL]
    return [
        1000 * (there - here)
        for key, arrivals in came.items()
        if key != FULL
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


class Shape(NamedTuple):
    """What is measured.

    Attributes:
        base: Address.
        engines: Who knows when tokens were made.
        look: What there is of streams, tasks and the like.
        processes: By what they do.
    """

    base: str
    engines: Child
    look: Callable[[], dict[str, int]]
    processes: dict[str, Child]


@contextlib.contextmanager
def alone(rate: float, role: str = "alone") -> Iterator[Shape]:
    server = Child(0, "tests.bench.stream_engines", role, str(rate))
    try:
        yield Shape(server.base, server, lambda: server.report() | {"sockets": sockets_of(server)}, {"server": server})
    finally:
        server.end()


@contextlib.contextmanager
def floor(rate: float) -> Iterator[Shape]:
    with alone(rate, "floor") as shape:
        yield shape


@contextlib.contextmanager
def fleet(rate: float, *flags: str, core: int | None = 0) -> Iterator[Shape]:
    """``flags``: of the frontend, which runs on ``core``, and the workers on the next; None: all anywhere."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        log = f"embedded://{folder}/log"
        beside = None if core is None else core + 1
        workers = Child(beside, "tests.bench.stream_engines", "workers", str(rate), log)
        stack.callback(workers.end)
        frontend = Child(
            core, "dynamo_es.cli.main", "frontend", "--http-host", "127.0.0.1", "--http-port", "0", "--log", log,
            "--router-mode", "kv", "--state-dir", f"{folder}/state", *flags,
        )  # fmt: skip
        stack.callback(frontend.end)
        wait_ready(frontend.base)

        def look() -> dict[str, int]:
            theirs = {f"workers' {key}": value for key, value in workers.report().items() if key != "resident_bytes"}
            theirs["workers' sockets"] = sockets_of(workers)
            return page_counts(frontend.base) | {"sockets": sockets_of(frontend)} | theirs

        yield Shape(frontend.base, workers, look, {"frontend": frontend, "workers": workers})


def wait_ready(base: str) -> None:
    """Of several processes that share the port each connection asks another one: all of a row of them must say yes."""
    deadline, said_yes = time.monotonic() + 60, 0
    while said_yes < ASKED:
        try:
            urllib.request.urlopen(f"{base}/v1/models/{NAME}/ready").close()
            said_yes += 1
        except OSError:
            said_yes = 0
            time.sleep(0.1)
        if time.monotonic() > deadline:
            sys.exit("the workers are not there")


def run_shape(name: str, options: argparse.Namespace) -> list[Row]:
    """Some rounds of load on one shape."""
    shapes: dict[str, Any] = {"alone": alone, "fleet": fleet, "floor": floor}
    rows: list[Row] = []
    with shapes[name](options.rate) as shape, tempfile.TemporaryDirectory() as folder:
        # A first short round loads what is loaded once: connections to workers, templates, code.
        rounds = [(20, 3.0), *[(options.streams, options.seconds)] * options.rounds]
        before: dict[str, int] = {}
        sizes: list[int] = []
        for number, (streams, seconds) in enumerate(rounds):
            round_rows = run_round(f"{name}, round {number}", shape, Path(folder), streams, seconds, number)
            now = settled(shape.look, before)
            if not number:
                before = {key: count for key, count in now.items() if key.endswith(LASTING)}
                continue
            sizes.append(now["resident_bytes"])
            rows += [*round_rows, (f"{name}, round {number}: memory after it", sizes[-1] / 2**20, "MiB")]
        growth = sizes[-1] / sizes[0] - 1
        rows.append((f"{name}: growth of memory from the first round to the last", 100 * growth, "%"))
        if growth > ALLOWED_GROWTH:
            sys.exit(f"{name}: memory grew by {100 * growth:.1f} %: {sizes}")
    return rows


def run_round(what: str, shape: Shape, folder: Path, streams: int, seconds: float, seed: int) -> list[Row]:
    """The load as a process of its own, and what it came to."""
    file, made = folder / "came", folder / "made"
    spent = {name: process.processor_s() for name, process in shape.processes.items()}
    load_s = _processor_s_of_ended()
    subprocess.run(
        [sys.executable, "-m", "tests.bench.bench_many_streams", "--load", shape.base, "--streams", str(streams),
         "--seconds", str(seconds), "--seed", str(seed), "--file", str(file)],
        check=True, preexec_fn=lambda: pin(1),
    )  # fmt: skip
    took = {name: process.processor_s() - spent[name] for name, process in shape.processes.items()}
    took["load"] = _processor_s_of_ended() - load_s
    shape.engines.report(str(made))
    begin = read_times(made)
    landed, read = (read_times(Path(f"{file}.{name}")) for name in (LANDED, READ))
    late = overheads_ms(begin, read)
    tokens = sum(len(times) for key, times in read.items() if key != FULL)
    return [
        (f"{what}: tokens a second at the client", len(late) / seconds, "tokens/s"),
        *latencies(f"{what}: from engine to client's socket", overheads_ms(begin, landed), "ms"),
        *latencies(f"{what}: from engine to client, read", late, "ms"),
        *((f"{what}: processor time of a token, {name}", 1e6 * took[name] / tokens, "us") for name in took),
    ]


def _processor_s_of_ended() -> float:
    """Of the processes that this one started and has seen the end of."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def main() -> list[Row]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rate", type=float, default=15, help="tokens a second and stream")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", choices=("", "alone", "fleet", "floor"))
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        sys.exit(int(generate_load(options.load, options.streams, options.seconds, options.seed, options.file) > 0))
    shapes = [options.only] if options.only else ["floor", "alone", "fleet"]
    rows = [row for name in shapes for row in run_shape(name, options)]
    for what, value, unit in rows:
        print(f"{what:<78} {value:12,.2f} {unit}")
    return rows


if __name__ == "__main__":
    main()

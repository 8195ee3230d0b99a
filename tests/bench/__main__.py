"""``python -m tests.bench [name ...]``: run the benchmarks one after another and print a table of their figures.

Every benchmark has a process of its own, so that none measures the heap, caches or threads of another.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
PREFIX = "bench_"


class Figure(NamedTuple):
    """One measured number."""

    what: str
    value: float
    unit: str


class Outcome(NamedTuple):
    """How one benchmark ended."""

    name: str
    seconds: float
    exit_code: int
    figures: list[Figure]


def list_benchmarks(folder: Path = FOLDER) -> list[str]:
    """Names of all benchmarks, sorted."""
    return sorted(path.stem.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*.py"))


def run_here(name: str, figures_file: Path) -> None:
    """Run one benchmark in this process and leave its figures in ``figures_file`` as JSON."""
    # A benchmark that can also be run by hand reads its own arguments; it gets none here.
    sys.argv = [name]
    result = importlib.import_module(f"tests.bench.{PREFIX}{name}").main()
    if inspect.isawaitable(result):

        async def wait() -> object:
            return await result

        result = asyncio.run(wait())
    rows = [] if result is None or isinstance(result, int) else list(result)
    figures_file.write_text(json.dumps([[str(what), float(value), str(unit)] for what, value, unit in rows]))
    if isinstance(result, int) and result:
        sys.exit(result)


def run_apart(name: str) -> Outcome:
    """Run one benchmark in a process of its own; its output goes where ours goes."""
    with tempfile.TemporaryDirectory() as folder:
        figures_file = Path(folder) / "figures.json"
        started = time.perf_counter()
        ended = subprocess.run(
            [sys.executable, "-m", "tests.bench", "--here", str(figures_file), name],
            cwd=FOLDER.parent.parent,
            check=False,
        )
        seconds = time.perf_counter() - started
        rows = json.loads(figures_file.read_text()) if figures_file.exists() else []
    return Outcome(name, seconds, ended.returncode, [Figure(*row) for row in rows])


def format_table(outcomes: Sequence[Outcome]) -> str:
    """Figures and outcomes as aligned text."""
    rows = [("benchmark", "what", "figure", "unit")]
    for outcome in outcomes:
        rows += [(outcome.name, figure.what, f"{figure.value:,.4g}", figure.unit) for figure in outcome.figures]
        state = "run time" if outcome.exit_code == 0 else f"FAILED (exit {outcome.exit_code})"
        rows.append((outcome.name, state, f"{outcome.seconds:.1f}", "s"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{name:<{widths[0]}}  {what:<{widths[1]}}  {figure:>{widths[2]}}  {unit}" for name, what, figure, unit in rows
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 if a benchmark failed, 2 if there is none of that name."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(list_benchmarks())}; default all")
    parser.add_argument("--here", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    known = list_benchmarks()
    names = options.names or known
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    if options.here:
        run_here(names[0], options.here)
        return 0
    print(f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores")
    outcomes = []
    for name in names:
        print(f"\n--- {name}", flush=True)
        outcomes.append(run_apart(name))
    print("\n" + format_table(outcomes))
    return int(any(outcome.exit_code for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())

"""The KV index by itself: memory a block, pauses while it grows, and a match, at ten million blocks."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np

from streams.kv_index_state import ModelIndex, Source, SourceKey
from tests.bench.spread import Row, latencies, percentile

BLOCKS = 10_000_000
WORKERS = 64
COLUMN = 4_096
QUERY = 128
QUERIES = 2_000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> list[Row]:
    rng = random.Random(1)
    index = ModelIndex(rng.getrandbits(64))
    sources = []
    for worker in range(WORKERS):
        source = Source(SourceKey("m", worker, 0), worker, -1, 1, 16)
        index.take_slot(source)
        index.set_exact(source, True)
        sources.append(source)
    before = resident_bytes()
    pauses = []
    most = 0.0
    for number in range(BLOCKS // COLUMN):
        column = rng.randbytes(8 * COLUMN)
        started = time.perf_counter()
        index.store(sources[number % WORKERS], 0, column)
        index.settle()
        pauses.append((time.perf_counter() - started) * 1e3)
        if number % 64 == 63:
            most = max(most, (resident_bytes() - before) / ((number + 1) * COLUMN) if number > 512 else 0.0)
    rows: list[Row] = [
        (f"index: memory a block at {BLOCKS / 1e6:.0f} M blocks", (resident_bytes() - before) / BLOCKS, "B"),
        ("index: most memory a block on the way (from 2 M)", most, "B"),
        (f"index: {COLUMN} new blocks, p50", percentile(pauses, 0.5), "ms"),
        (f"index: {COLUMN} new blocks, p99", percentile(pauses, 0.99), "ms"),
        (f"index: {COLUMN} new blocks, largest", max(pauses), "ms"),
    ]
    for held in (QUERY, 0):
        prompt = rng.randbytes(8 * QUERY)
        if held:
            for source in sources[:16]:
                index.store(source, 0, prompt)
        hashes = np.frombuffer(prompt, "<u8").tolist()
        times = []
        for _ in range(QUERIES):
            started = time.perf_counter()
            index.match(np.array(hashes, np.uint64), 16)
            times.append((time.perf_counter() - started) * 1e6)
        rows += latencies(f"index: match of {QUERY} blocks, {held} held by 16 workers", times, "µs")
    return rows


if __name__ == "__main__":
    for row in main():
        print(*row)

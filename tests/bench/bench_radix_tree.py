"""``RadixTree`` through its Python API, against Dynamo's in turns, each round in a fresh process.

``DYN_ES_REFERENCE_PYTHON`` names the interpreter that has ai-dynamo-runtime (see CONTRIBUTING); without it only ours
is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time

EVENTS = 400
BLOCKS = 128
ROUNDS = 11


def measure(module: str) -> tuple[float, float]:
    """Events of 128 new blocks applied a second, and prompts of 128 blocks matched a second."""
    tree = __import__(module, fromlist=["RadixTree"]).RadixTree()
    rng = random.Random(5)
    chains = [[(rng.getrandbits(64), rng.getrandbits(64)) for _ in range(BLOCKS)] for _ in range(EVENTS)]
    events = []
    for number, chain in enumerate(chains):
        blocks = [{"block_hash": block, "tokens_hash": tokens} for block, tokens in chain]
        stored = {"parent_hash": None, "blocks": blocks}
        events.append(json.dumps({"event_id": number, "data": {"stored": stored}, "dp_rank": 0}).encode())
    prompts = [[tokens for _, tokens in chain] for chain in chains]
    started = time.perf_counter()
    for number, event in enumerate(events):
        tree.apply_event(number % 8, event)
    applied = time.perf_counter()
    for prompt in prompts:
        tree.find_matches(prompt)
    found = time.perf_counter()
    return EVENTS / (applied - started), EVENTS / (found - applied)


async def round_of(python: str, module: str) -> tuple[float, float]:
    child = await asyncio.create_subprocess_exec(python, __file__, module, stdout=asyncio.subprocess.PIPE)
    applied, found = (await child.communicate())[0].split()
    return float(applied), float(found)


async def main() -> list[tuple[str, float, str]]:
    from tests.bench.spread import rounds

    reference = os.environ.get("DYN_ES_REFERENCE_PYTHON")
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(await round_of(sys.executable, "dynamo_es.llm"))
        if reference:
            theirs.append(await round_of(reference, "dynamo.llm"))
    rows = []
    for place, what in enumerate((f"RadixTree: events of {BLOCKS} blocks", f"RadixTree: matches of {BLOCKS} blocks")):
        rows += rounds(what, [pair[place] for pair in ours], "1/s")
        if theirs:
            rows += rounds(f"{what}, Dynamo", [pair[place] for pair in theirs], "1/s")
            ratios = [mine[place] / other[place] for mine, other in zip(ours, theirs, strict=True)]
            rows += rounds(f"{what}, ours against Dynamo's", ratios, "ratio")
    return rows


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(*measure(sys.argv[1]))
    else:
        for row in asyncio.run(main()):
            print(*row)

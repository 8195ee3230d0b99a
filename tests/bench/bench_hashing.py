"""Hashing a prompt: what every request pays in the router, and every stored block in a publisher."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from functools import partial
from random import Random

from dynamo_es.router.hashing import compute_block_hash_for_seq, hash_blocks, hash_prompt

BLOCK_SIZE = 16
LENGTHS = (256, 2_048, 16_384)
FUNCTIONS: tuple[Callable[[list[int], int], object], ...] = (hash_blocks, hash_prompt, compute_block_hash_for_seq)


def measure(function: Callable[[list[int], int], object], tokens: list[int]) -> float:
    """Microseconds of one call, best of seven."""
    calls = 2_000_000 // len(tokens)
    return min(timeit.repeat(partial(function, tokens, BLOCK_SIZE), number=calls, repeat=7)) / calls * 1e6


def main() -> list[tuple[str, float, str]]:
    random = Random(7)
    figures = []
    for length in LENGTHS:
        tokens = [random.randrange(150_000) for _ in range(length)]
        figures += [
            (f"{function.__name__}, {length:,} tokens", measure(function, tokens), "µs") for function in FUNCTIONS
        ]
    return figures

"""A model runner without a model: its pool keeps tokens, and what follows a sequence depends on all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from dynamo_es.engines.transformers_engine.sampler import Choice
from dynamo_es.engines.transformers_engine.work import SequenceWork
from dynamo_es.errors import InvalidArgument

VOCAB = 64


def next_token(sequence: Sequence[int], adapter: str | None = None) -> int:
    """What the model says behind ``sequence``; never one of the first 8 tokens."""
    state = len(adapter or "")
    for token in sequence:
        state = (state * 31 + token + 7) % 1_000_003
    return 8 + state % (VOCAB - 8)


def answer(prompt: Sequence[int], count: int, adapter: str | None = None) -> list[int]:
    """The greedy answer to ``prompt``."""
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(next_token(sequence, adapter))
    return sequence[len(prompt) :]


class PretendModel:
    """A ``ModelRunner``. ``before_pass`` is called on its thread; ``seen`` are the parts of all passes.

    An adapter that is loaded makes what its folder's name would make.

    A part is computed from what is in the pool: if a block were not what its request takes it for, another token would
    come out.
    """

    def __init__(self, block_size: int, before_pass: Callable[[], None] = lambda: None) -> None:
        self._block_size = block_size
        self._before_pass = before_pass
        self._pool: dict[tuple[int, int], int] = {}
        self.seen: list[list[SequenceWork]] = []
        self.threads: set[str] = set()
        self.adapters: dict[str, str] = {}

    def load_adapter(self, name: str, folder: str) -> None:
        if "misfit" in folder:
            raise InvalidArgument(f"the adapter {name} does not fit the model")
        self.adapters[name] = folder

    def unload_adapter(self, name: str) -> None:
        self.adapters.pop(name, None)

    def run(self, works: Sequence[SequenceWork]) -> list[Choice | None]:
        self.threads.add(threading.current_thread().name)
        self._before_pass()
        self.seen.append(list(works))
        for work in works:
            for place, token in enumerate(work.tokens, work.start):
                self._pool[self._slot(work, place)] = token
        return [self._choose(work) for work in works]

    def _slot(self, work: SequenceWork, place: int) -> tuple[int, int]:
        return work.blocks[place // self._block_size], place % self._block_size

    def _choose(self, work: SequenceWork) -> Choice | None:
        if work.sampler is None:
            return None
        end = work.start + len(work.tokens)
        sequence = [self._pool[self._slot(work, place)] for place in range(end)]
        logits = np.zeros(VOCAB, np.float32)
        logits[next_token(sequence, self.adapters.get(work.adapter or "", work.adapter))] = 5.0
        return work.sampler.choose(logits)

"""What one pass of the model computes, handed from the event loop to the thread of the model. Pure.

Everything in it is a copy: requests may be added and aborted while a pass runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from dynamo_es.engines.scheduling.request import EngineRequest, PassPlan
from dynamo_es.engines.transformers_engine.sampler import Choice, Sampler
from dynamo_es.router.hashing import block_seed


class ChosenTokens(Iterator[int]):
    """Tokens on their way from the model to the scheduler, which takes one for each that ``put`` brought."""

    __slots__ = ("_tokens",)

    def __init__(self) -> None:
        self._tokens: list[int] = []

    def put(self, token_id: int) -> None:
        """A token that a pass brought."""
        self._tokens.append(token_id)

    def __next__(self) -> int:
        if not self._tokens:
            raise StopIteration
        return self._tokens.pop(0)


class GenerationRequest(EngineRequest):
    """A request whose tokens come from a model. Its scheduler follows vLLM's."""

    __slots__ = ("chosen", "cumulative_logprob", "last", "min_tokens", "sampler", "stop_ids")

    def __init__(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampler: Sampler,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """``sampler``: chooses its tokens; its options say where the answer ends."""
        self.chosen = ChosenTokens()
        seed = block_seed(lora_name, cache_salt)
        super().__init__(prompt, max_tokens, self.chosen, seed, lora_name=lora_name, cache_salt=cache_salt)
        self.sampler = sampler
        self.stop_ids = sampler.options.stop_ids
        self.min_tokens = sampler.options.min_tokens
        self.last: Choice | None = None
        self.cumulative_logprob = 0.0

    def take(self, choice: Choice) -> None:
        """What a pass brought; the scheduler hears of it next."""
        self.last = choice
        self.chosen.put(choice.token_id)
        if choice.logprob is not None:
            self.cumulative_logprob += choice.logprob

    def end_after(self, token: int | None) -> str | None:
        """As ``EngineRequest``; a token that stops it is its last one."""
        if token in self.stop_ids and self.generated > self.min_tokens:
            return "stop"
        return super().end_after(token)


@dataclass(frozen=True, slots=True)
class SequenceWork:
    """A part of a sequence that a pass computes.

    Attributes:
        tokens: The part's tokens.
        start: Position of the first; the KV of those before it is in the blocks.
        blocks: Numbers of the sequence's blocks, with room for the part.
        adapter: Of the request; None: the model itself.
        sampler: Chooses the token that follows; None: the part is not the sequence's end.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    adapter: str | None
    sampler: Sampler | None


class ModelRunner(Protocol):
    """A model with its KV pool. Belongs to one thread."""

    def run(self, works: Sequence[SequenceWork]) -> list[Choice | None]:
        """Compute a pass; for each part with a sampler the token that follows. Blocks as long as the model takes."""

    def load_adapter(self, name: str, folder: str) -> None:
        """Have a LoRA adapter for the passes that follow. Blocks.

        Raises:
            ConfigError: There is no peft.
            InvalidArgument: It does not fit the model; nothing of it stays.
        """

    def unload_adapter(self, name: str) -> None:
        """Drop a loaded adapter, which no further pass names."""


def works_of(plan: PassPlan) -> list[SequenceWork]:
    """The parts of a planned pass, in its order."""
    works = []
    for request, count in plan.work.items():
        assert isinstance(request, GenerationRequest)
        start, end = request.computed, request.computed + count
        sampler = request.sampler if end == len(request.tokens) else None
        works.append(SequenceWork(request.tokens[start:end], start, tuple(request.table), request.lora_name, sampler))
    return works

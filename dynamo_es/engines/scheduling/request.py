"""A request in an engine, and what a pass does for requests. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dynamo_es.engines.scheduling.timing import PassTimes
from dynamo_es.router.hashing import HASH_SEED, compute_sequence_hashes, hash_blocks
from schemas.forward_pass import QueuedRequests, ScheduledRequests


class EngineRequest:
    """A request in the engine. ``tokens`` is the prompt with what was generated so far."""

    __slots__ = (
        "block_hashes", "block_size", "cache_salt", "cached_tokens", "computed", "decoding", "finished", "kept",
        "lora_name", "max_tokens", "output", "preempted", "prompt_length", "seed", "sequence_hashes", "table", "tokens",
        "transferred",
    )  # fmt: skip

    def __init__(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        output: Iterator[int],
        seed: int = HASH_SEED,
        transferred: bool = False,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """``output`` gives the generated tokens, and may end before ``max_tokens``. ``seed``: ``block_seed``, of the
        adapter and the salt. ``transferred``: another worker computed the prompt.
        """
        self.transferred = transferred
        self.lora_name = lora_name
        self.cache_salt = cache_salt
        self.block_size = 0
        # Blocks at the beginning of the table that are cached, or were found so.
        self.kept = 0
        self.tokens = list(prompt)
        self.prompt_length = len(self.tokens)
        self.max_tokens = max_tokens
        self.output = output
        self.seed = seed
        self.block_hashes: list[int] = []
        self.sequence_hashes: list[int] = []
        self.table: list[int] = []
        self.computed = 0
        self.cached_tokens = 0
        self.decoding = False
        self.preempted = False
        self.finished = False

    @property
    def generated(self) -> int:
        """Tokens that came out."""
        return len(self.tokens) - self.prompt_length

    @property
    def arrives(self) -> bool:
        """Whether it comes with the blocks of its prompt when it is admitted."""
        return self.transferred and not self.preempted

    def end_after(self, token: int | None) -> str | None:
        """Why it is over with its newest token, if it is; None as a token: there was no more."""
        if token is None:
            return "stop"
        return "length" if self.generated >= self.max_tokens else None

    def block_tokens(self, index: int) -> Sequence[int]:
        """The tokens of block ``index``."""
        return self.tokens[index * self.block_size : (index + 1) * self.block_size]

    def hash_until(self, end: int) -> None:
        """Know the hashes of the first ``end`` blocks, which are full."""
        known, size = len(self.block_hashes), self.block_size
        if known >= end:
            return
        sequences = self.sequence_hashes
        fresh = hash_blocks(self.tokens[known * size : end * size], size, self.seed)
        sequences += compute_sequence_hashes(fresh, sequences[-1] if sequences else None)
        self.block_hashes += fresh


class Emission(NamedTuple):
    """What a request gets from a pass: a token (None: it had no more), and why it is over, if it is."""

    request: EngineRequest
    token: int | None
    finish_reason: str | None


@dataclass(slots=True)
class PassPlan:
    """One pass: how many tokens of which requests are computed."""

    work: dict[EngineRequest, int] = field(default_factory=dict)
    times: PassTimes = field(default_factory=lambda: PassTimes(0.0, 0.0))
    scheduled: ScheduledRequests = field(default_factory=ScheduledRequests)
    queued: QueuedRequests = field(default_factory=QueuedRequests)

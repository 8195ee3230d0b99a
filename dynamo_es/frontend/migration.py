"""Carrying a request on to another worker when the one that had it fails (spec/frontend.md 6.4). Pure.

The next worker gets the prompt with the tokens generated so far behind it, and so many tokens less to generate. What
the client gets is one answer: text, stop strings, thoughts and calls are made above this, from one row of tokens.

What cannot be continued by its tokens alone starts over as long as nothing of it was sent, and fails after that: a
grammar (guided decoding) would begin anew in the middle, of several choices one would lose its tokens, and text that
came without tokens cannot be told to another worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from dynamo_es.errors import CannotConnect, ConnectionTimeout, Disconnected, EngineShutdown, StreamIncomplete
from dynamo_es.router.eligibility import NOBODY
from dynamo_es.router.errors import AllWorkersOverloaded
from dynamo_es.runtime.errors import Overloaded

Kind = Literal["new_request", "ongoing_request"]
LOST = (CannotConnect, ConnectionTimeout, Disconnected, EngineShutdown, StreamIncomplete, Overloaded)
"""Failures of a worker that are none of the request's."""
_LENGTH = "length"


@dataclass(frozen=True, slots=True)
class MigrationSettings:
    """When requests are carried on.

    Attributes:
        limit: How often one request may be; 0: never.
        max_seq_len: A request with more tokens than this, prompt and output, is not; None: any length.
        context_length: Tokens that the model takes, prompt and output; 0: not known.
    """

    limit: int = 0
    max_seq_len: int | None = None
    context_length: int = 0


class MigrationObserver(Protocol):
    """Counts migrations."""

    def worker_lost(self, kind: Kind) -> None:
        """A worker failed a request that another could have: ``new_request``: before anything came of it."""

    def migrated(self, kind: Kind, seconds: float, *, recovered: bool) -> None:
        """A request that was carried on had output again (``recovered``) or failed, so long after its worker had."""


class Migration:
    """One request over all its workers; a ``Resumption``. Belongs to the request.

    For each worker: ``begin``, ``take`` for what it sends; after a failure ``is_over`` and ``is_resuming`` say what
    becomes of the request.
    """

    def __init__(
        self,
        request: dict[str, Any],
        settings: MigrationSettings,
        observer: MigrationObserver | None,
        now: Callable[[], float],
    ) -> None:
        self._request = request
        self._settings = settings
        self._observer = observer
        self._now = now
        self._generated: list[int] = []
        self._before = 0
        self._prompt_tokens: int | None = None
        self._begun = False
        self._finished = False
        self._continuable = _is_continuable(request)
        self._used = 0
        self._lost_at: float | None = None
        self._lost_kind: Kind = "new_request"
        self.excluded = NOBODY
        self.last_attempt = 0
        self.is_resuming = False
        self.failure: Exception | None = None

    @property
    def _kind(self) -> Kind:
        return "ongoing_request" if self._begun else "new_request"

    @property
    def is_over(self) -> bool:
        """It has all that it wanted, whatever happened to its worker then."""
        if not self._settings.limit:
            return False
        return self._finished or (self._begun and self._continuable and self._left == 0)

    def begin(self) -> dict[str, Any]:
        """What the next worker gets."""
        self.is_resuming = False
        self._before = len(self._generated)
        return continued(self._request, self._generated) if self._generated else self._request

    def take(self, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Note frames of a worker; returns them as the first one would have sent them."""
        if not self._settings.limit:
            self._begun = True
            return batch
        if self._lost_at is not None:
            self._settle(recovered=True)
        for place, frame in enumerate(batch):
            token_ids = frame.get("token_ids") if isinstance(frame, dict) else None
            if token_ids is None or frame.get("index") or (frame.get("text") and not token_ids):
                self._begun, self._continuable = True, False
                continue
            if token_ids:
                self._begun = True
                self._generated += token_ids
            if frame.get("finish_reason") is not None:
                self._finished = self._continuable
            usage = frame.get("completion_usage")
            if usage is not None:
                batch[place] = frame | {"completion_usage": self._original(usage)}
        return batch

    def resumes(self, error: Exception, worker_id: int, attempt: int) -> bool:
        """As ``Resumption``."""
        self.excluded |= {worker_id}
        self.last_attempt = max(self.last_attempt, attempt)
        return self.may_resume(error)

    def may_resume(self, error: Exception) -> bool:
        """Whether the request is carried on after this failure; counts it, once for each worker that is begun with."""
        if self.is_resuming:
            return True
        if self.is_over or not isinstance(error, LOST) or self._used >= self._settings.limit or not self._fits:
            return False
        self._used += 1
        self.is_resuming = True
        self.failure = error
        self._note_loss()
        self._lost_at, self._lost_kind = self._now(), self._kind
        return True

    def end(self, error: Exception) -> None:
        """The request fails for good."""
        if self._lost_at is not None:
            self._settle(recovered=False)
        elif isinstance(error, LOST) and not isinstance(error, AllWorkersOverloaded):
            self._note_loss()

    def rest(self) -> list[dict[str, Any]]:
        """Frames of an end that its last worker did not come to say, if it has all that it wanted."""
        return [] if self._finished else [{"token_ids": [], "finish_reason": _LENGTH}]

    def _note_loss(self) -> None:
        if self._observer is not None:
            self._observer.worker_lost(self._kind)

    def _settle(self, *, recovered: bool) -> None:
        assert self._lost_at is not None
        if self._observer is not None:
            self._observer.migrated(self._lost_kind, self._now() - self._lost_at, recovered=recovered)
        self._lost_at = None

    @property
    def _length(self) -> int:
        return len(self._request.get("token_ids") or ()) + len(self._generated)

    @property
    def _left(self) -> int | None:
        """Tokens that may still be generated; None: not known."""
        limits = []
        wanted = (self._request.get("stop_conditions") or {}).get("max_tokens")
        if wanted is not None:
            limits.append(wanted - len(self._generated))
        if self._settings.context_length > 0:
            limits.append(self._settings.context_length - self._length)
        return max(min(limits), 0) if limits else None

    @property
    def _fits(self) -> bool:
        longest = self._settings.max_seq_len
        return (self._continuable or not self._begun) and (longest is None or self._length <= longest)

    def _original(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """A worker's counts without the output that was part of its prompt."""
        counts = dict(usage)
        prompt = counts.get("prompt_tokens")
        if not self._before:
            self._prompt_tokens = prompt
        elif prompt is not None:
            counts["prompt_tokens"] = prompt = self._prompt_tokens or max(prompt - self._before, 0)
            details = counts.get("prompt_tokens_details")
            if details and details.get("cached_tokens"):
                counts["prompt_tokens_details"] = {**details, "cached_tokens": min(details["cached_tokens"], prompt)}
        return counts


def _is_continuable(request: Mapping[str, Any]) -> bool:
    """Whether its output so far is all that another worker needs to know."""
    sampling = request.get("sampling_options") or {}
    token_ids = request.get("token_ids")
    return (
        isinstance(token_ids, list)
        and not (token_ids and isinstance(token_ids[0], list))
        and (sampling.get("n") or 1) == 1
        and (sampling.get("best_of") or 1) == 1
        and not sampling.get("guided_decoding")
    )


def continued(request: Mapping[str, Any], generated: Sequence[int]) -> dict[str, Any]:
    """A request for what is left after ``generated``; at least one token is."""
    count = len(generated)
    stop = dict(request.get("stop_conditions") or {})
    for name, least in (("max_tokens", 1), ("min_tokens", 0), ("max_thinking_tokens", 0)):
        if stop.get(name) is not None:
            stop[name] = max(stop[name] - count, least)
    routing = dict(request.get("routing") or {})
    if routing.get("expected_output_tokens") is not None:
        routing["expected_output_tokens"] = max(routing["expected_output_tokens"] - count, 1)
    # The prompt was told about already: neither it nor its log probabilities are wanted again.
    extra = {name: value for name, value in (request.get("extra_args") or {}).items() if name != "echo"}
    result = {
        **request,
        "token_ids": [*request["token_ids"], *generated],
        "stop_conditions": stop,
        "output_options": {**(request.get("output_options") or {}), "prompt_logprobs": None},
        "routing": routing,
    }
    if "extra_args" in request:
        result["extra_args"] = extra
    return result

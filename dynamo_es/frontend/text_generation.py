"""Runs a request at a worker that gets text and sends OpenAI's chunks, which clients of the same route get as they are.

In the place of ``Generation`` and its pipeline: nothing is tokenized, detokenized or parsed here. Routes that speak
otherwise (responses, messages) write what the chunks say in their own way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo_es.clock import Clock
from dynamo_es.frontend.contracts import ServedModel
from dynamo_es.frontend.errors import ApiError, OutputError
from dynamo_es.frontend.generation import Generation, Read
from dynamo_es.frontend.metrics import RequestMeter
from dynamo_es.frontend.pipeline import Delta
from dynamo_es.frontend.responses import ChoiceText
from dynamo_es.frontend.text_requests import Folded, TextChunk
from dynamo_es.runtime.context import Context


class ChunkDelta(Delta):
    """The deltas of one chunk as one, with the chunk: for a writer that passes chunks on."""

    value: Mapping[str, Any]


class TextOutput:
    """What is known of such an output, by the names of ``OutputPipeline``. ``generated`` counts chunks with text."""

    def __init__(self) -> None:
        self.generated = 0
        self.any_finished = False
        self.cut = False
        self.worker_usage: Mapping[str, Any] | None = None

    def finish(self) -> list[Delta]:
        """Nothing is held back."""
        return []

    def take(self, chunk: TextChunk) -> None:
        """The next chunk."""
        usage = chunk.value.get("usage")
        if isinstance(usage, dict):
            self.worker_usage = usage
        self.any_finished |= any(delta.finish_reason is not None for delta in chunk.deltas)
        self.generated += sum(bool(delta.text or delta.reasoning or delta.calls) for delta in chunk.deltas)

    def usage(self, prompt_tokens: int) -> dict[str, Any]:
        """The worker's token counts; without them, ``prompt_tokens`` and its chunks."""
        counted = {"prompt_tokens": prompt_tokens, "completion_tokens": self.generated}
        given = {name: value for name, value in (self.worker_usage or {}).items() if value is not None}
        result = {**counted, **given}
        return {"total_tokens": result["prompt_tokens"] + result["completion_tokens"], **result}


class TextGeneration(Generation):
    """One request at one worker.

    Args:
        model: Whom it goes to.
        request: What the worker gets.
        context: Stopped by whoever interrupts the request.
        meter: Told of every arrival; a chunk counts as a token.
        clock: Time.
        passes: Chunks are handed on as they are, as ``ChunkDelta``; otherwise what they say is.
        folded: Gets all chunks; None: nobody does.
    """

    has_short_way = False

    def __init__(
        self,
        model: ServedModel,
        request: dict[str, Any],
        context: Context,
        meter: RequestMeter,
        clock: Clock,
        *,
        passes: bool,
        folded: Folded | None = None,
    ) -> None:
        self._model = model
        self._request = request
        self._context = context
        self._meter = meter
        self._clock = clock
        self._passes = passes
        self._folded = folded
        self._seen: set[int] = set()
        self._output = TextOutput()
        self.pipeline = self._output
        self.prompt_tokens = 0
        self.extras = None

    def _read(self, arrived: Sequence[Any]) -> Read:
        before = self._output.generated
        deltas: list[Delta] = []
        failure: OutputError | None = None
        for item in arrived:
            try:
                chunk = TextChunk(item, self._seen)
            except OutputError as error:
                failure = error
                break
            self._output.take(chunk)
            if self._folded is not None:
                self._folded.add(chunk)
            deltas += [_carrier(chunk)] if self._passes else chunk.deltas
        return deltas, self._output.generated - before, failure


def _carrier(chunk: TextChunk) -> ChunkDelta:
    carrier = ChunkDelta(0, "", None, first=False, tokens=0)
    carrier.value = chunk.value
    return carrier


def finish_reasons(delta: Delta) -> Sequence[str]:
    """How the choices of a delta ended, if they did; those of a chunk that is passed on as well."""
    if not isinstance(delta, ChunkDelta):
        return () if delta.finish_reason is None else (delta.finish_reason,)
    choices = delta.value.get("choices")
    found = [one.get("finish_reason") for one in choices if isinstance(one, dict)] if isinstance(choices, list) else []
    return [reason for reason in found if isinstance(reason, str)]


class PassingWriter:
    """A ``Writer`` that passes a worker's chunks on; a unary answer is what they make together."""

    running_usage = False

    def __init__(self, folded: Folded) -> None:
        """``folded``: gets the chunks of a unary answer."""
        self._folded = folded

    def head(self) -> bytes:
        return b""

    def chunk(self, delta: Delta, usage: Mapping[str, Any] | None) -> bytes:
        assert isinstance(delta, ChunkDelta)
        return b"data: " + msgspec.json.encode(delta.value) + b"\n\n"

    def tail(self, usage: Mapping[str, Any]) -> bytes:
        return b""

    def failure(self, error: ApiError) -> bytes:
        return error.frame()

    def body(self, choices: Sequence[ChoiceText], usage: Mapping[str, Any] | None) -> bytes:
        return self._folded.body()

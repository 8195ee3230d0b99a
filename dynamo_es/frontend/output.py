"""The encoders of a prepared request, and the blocks of a stream that are not chunks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from dynamo_es.frontend.pipeline import Delta
from dynamo_es.frontend.prepare import Prepared
from dynamo_es.frontend.requests import ChatRequest
from dynamo_es.frontend.responses import ChatEncoder, ChatStyle, ChoiceText, CompletionEncoder, Encoder

KEEP_ALIVE = b":\n\n"


class Output(Protocol):
    """What one worker request came to, so far; ``OutputPipeline`` is one.

    Attributes:
        cut: All choices are over and the worker does not know it yet.
        worker_usage: Token counts as the worker sent them, or None.
    """

    cut: bool
    worker_usage: Mapping[str, Any] | None

    @property
    def any_finished(self) -> bool:
        """Whether a choice came to a regular end."""

    def finish(self) -> list[Delta]:
        """What is held back, at the end of the worker's stream."""

    def usage(self, prompt_tokens: int) -> dict[str, Any]:
        """Token counts; ``prompt_tokens`` as they were counted here."""


def encoder_of(
    prepared: Prepared,
    request_id: str,
    created: int,
    prompt: int = 0,
    style: ChatStyle | None = None,
) -> Encoder:
    """The encoder for the output of prompt number ``prompt``; chunks of a batch carry its number in their id."""
    request, model = prepared.request, prepared.model
    tokens_as_ids = bool(request.return_tokens_as_token_ids)
    if isinstance(request, ChatRequest):
        parsing = prepared.options.parsing
        return ChatEncoder(
            request_id,
            model.name,
            created,
            model.tokenizer,
            tokens_as_ids=tokens_as_ids,
            reads_calls=parsing is not None and parsing.reads_calls,
            style=style or ChatStyle(),
        )
    return CompletionEncoder(
        request_id,
        model.name,
        created,
        model.tokenizer,
        tokens_as_ids=tokens_as_ids,
        first_index=prompt * prepared.options.n,
    )


def annotation_frames(prepared: Prepared, request_id: str) -> bytes:
    """The events that ``nvext.annotations`` asks for, each with its value in a comment line (spec/frontend.md 3.4)."""
    extension = prepared.request.nvext
    wanted = extension.annotations if extension is not None else None
    if not wanted:
        return b""
    values = {"request_id": request_id}
    if prepared.formatted_prompt is not None:
        values["formatted_prompt"] = prepared.formatted_prompt
    values["token_ids"] = msgspec.json.encode(prepared.requests[0]["token_ids"]).decode()
    return b"".join(
        b"event: %b\n: %b\n\n" % (name.encode(), msgspec.json.encode(value))
        for name, value in values.items()
        if name in wanted
    )


class UnaryAnswer:
    """Collects the choices of a unary answer.

    Args:
        prompt: Number of the prompt.
        n: Choices a prompt.
    """

    def __init__(self, prompt: int, n: int) -> None:
        self._first = prompt * n
        self._choices: dict[int, ChoiceText] = {}

    def choice(self, index: int) -> ChoiceText:
        """The choice of this index, made when it is first asked for."""
        found = self._choices.get(index)
        if found is None:
            found = self._choices[index] = ChoiceText(self._first + index)
        return found

    def choices(self) -> list[ChoiceText]:
        """All choices in order; at least one, so that an empty output is an empty answer."""
        if not self._choices:
            self.choice(0)
        return [self._choices[index] for index in sorted(self._choices)]


def total_usage(pipelines: Sequence[Output], prompt_tokens: list[int]) -> dict[str, object]:
    """Token counts of all prompts of a request together; details only if there is one prompt."""
    counts = [pipeline.usage(tokens) for pipeline, tokens in zip(pipelines, prompt_tokens, strict=True)]
    if len(counts) == 1:
        return counts[0]
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {name: sum(count[name] for count in counts) for name in names}


def cached_tokens(pipelines: Sequence[Output]) -> int | None:
    """Cached prompt tokens that workers reported, or None if none did."""
    total: int | None = None
    for pipeline in pipelines:
        details = (pipeline.worker_usage or {}).get("prompt_tokens_details")
        count = details.get("cached_tokens") if details else None
        if count is not None:
            total = (total or 0) + count
    return total

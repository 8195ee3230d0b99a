"""A chat processor on the way of all requests: what it prepares is routed, what it reads is written as for others.

In the place of ``prepare`` and of ``OutputPipeline``; routes, errors, metrics and cancellation are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from dynamo_es.clock import Clock
from dynamo_es.errors import DynamoException, InvalidArgument
from dynamo_es.frontend.capabilities import check_supported
from dynamo_es.frontend.chat_choices import Choice
from dynamo_es.frontend.chat_processing import ChatOutput, ChatProcessor, Flush
from dynamo_es.frontend.contracts import ServedModel
from dynamo_es.frontend.errors import ApiError, OutputError
from dynamo_es.frontend.faults import describe
from dynamo_es.frontend.generation import Generation, Read
from dynamo_es.frontend.metrics import RequestMeter
from dynamo_es.frontend.parsers.choice import CallDelta
from dynamo_es.frontend.pipeline import Delta, OutputOptions, TokenLogprob, finish_of_worker, usage_of
from dynamo_es.frontend.prepare import Prepared
from dynamo_es.frontend.preprocess import check_prompt, check_prompt_ids, check_vocabulary
from dynamo_es.frontend.requests import ChatRequest
from dynamo_es.frontend.response_extras import ResponseExtras
from dynamo_es.http_error import HttpError
from dynamo_es.runtime.context import Context

logger = logging.getLogger(__name__)


def request_as_json(request: ChatRequest) -> dict[str, Any]:
    """A request as a chat processor gets it: without unset members, and without those that are dropped anyway."""
    given = {
        name: value
        for name in request.__struct_fields__
        if (value := getattr(request, name)) is not None and not isinstance(value, msgspec.Raw)
    }
    result: dict[str, Any] = _plain(msgspec.to_builtins(given))
    return result


def _plain(value: Any) -> Any:
    """Objects without null members; what a client gives as a mapping of its own has none that matter."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list) else value


async def prepare_processed(
    request: ChatRequest, model: ServedModel, processor: ChatProcessor, clock: Clock
) -> Prepared:
    """Check, render and tokenize a valid chat request by its model's processor.

    Raises:
        ApiError: The processor refuses it, its prompt does not fit, or the model's workers do not do what it asks for.
    """
    check_supported(request, model)
    check_vocabulary(request, model)
    given = request.nvext.token_data if request.nvext is not None else None
    if given:
        raise ApiError(
            400, "Validation: nvext.token_data is not taken with this frontend's chat processor", param="nvext"
        )
    start = clock.monotonic()
    try:
        chat = await processor.prepare(request_as_json(request))
    except ApiError:
        raise  # of the threads that prepare: they have no room
    except InvalidArgument as error:
        raise ApiError(400, str(error)) from error
    except HttpError as error:
        raise ApiError(error.code, error.message) from error
    except DynamoException as error:
        # Its text may quote the prompt, which neither the client's answer nor a log may.
        cause = error.__cause__ if error.__cause__ is not None else error
        logger.warning("model %s: its chat processor did not prepare a request: %s", model.name, describe(cause))
        raise ApiError(400, "Invalid request", param="messages", code="template_error") from cause
    token_ids = chat.worker_request["token_ids"]
    check_prompt_ids(token_ids, model, "messages")
    check_prompt(model, token_ids, "messages")
    chat.worker_request["model"] = model.name
    return Prepared(
        request=request,
        model=model,
        requests=[chat.worker_request],
        options=OutputOptions(n=request.n or 1, logprobs=bool(request.logprobs)),
        formatted_prompt=None,
        template_s=0.0,
        tokenize_s=clock.monotonic() - start,
        open_output=chat.open_output,
    )


class ProcessedOutput:
    """Output of one worker request by the names of ``OutputPipeline``, read by a chat processor.

    Args:
        output: The processor's.
        options: Of the request: choices, log probabilities.
    """

    def __init__(self, output: ChatOutput, options: OutputOptions) -> None:
        self._output = output
        self._options = options
        self._seen: set[int] = set()
        self._calls: dict[int, set[int]] = {}
        self._logprobs: dict[int, list[TokenLogprob]] = {}
        self._finished = 0
        self._reasons = False
        self.generated = 0
        self.reasoned = 0
        self.cut = False
        self.worker_usage: Mapping[str, Any] | None = None

    @property
    def any_finished(self) -> bool:
        """Whether a choice came to a regular end."""
        return self._finished > 0

    def push(self, frame: Mapping[str, Any]) -> list[Delta]:
        """What the frame adds.

        Raises:
            OutputError: The frame reports a failure, or an end that is not known.
        """
        if frame.get("finish_reason") is not None:
            finish_of_worker(frame["finish_reason"])
        usage = frame.get("completion_usage")
        if usage is not None:
            self.worker_usage = usage
        if self._options.logprobs:
            self._keep_logprobs(frame)
        self.generated += len(frame.get("token_ids") or ())
        flush = self._output.push(frame)
        return [] if flush is None else self._deltas(flush)

    def finish(self) -> list[Delta]:
        """What is held back, at the end of the worker's stream."""
        flush = self._output.finish()
        return [] if flush is None else self._deltas(flush)

    def usage(self, prompt_tokens: int) -> dict[str, Any]:
        """As ``usage_of``."""
        return usage_of(self.worker_usage, prompt_tokens, self.generated, self.reasoned if self._reasons else None)

    def _keep_logprobs(self, frame: Mapping[str, Any]) -> None:
        tops = frame.get("top_logprobs") or ()
        kept = self._logprobs.setdefault(frame.get("index") or 0, [])
        pairs = zip(frame.get("token_ids") or (), frame.get("log_probs") or (), strict=False)
        kept += [
            TokenLogprob(token_id, value, tops[place] if place < len(tops) else ())
            for place, (token_id, value) in enumerate(pairs)
        ]

    def _deltas(self, flush: Flush) -> list[Delta]:
        self.cut = self.cut or flush.cut
        left = flush.tokens
        deltas = []
        for choice in flush.choices:
            deltas.append(self._delta(choice, left, flush.stop))
            left = 0
        return deltas

    def _delta(self, choice: Choice, tokens: int, stop: str | None) -> Delta:
        index, finish, told = choice["index"], choice["finish_reason"], choice["delta"]
        reasoning = told.get("reasoning_content") or ""
        if reasoning:
            self._reasons = True
            self.reasoned += tokens
        if finish is not None:
            self._finished += 1
        first = index not in self._seen
        self._seen.add(index)
        return Delta(
            index,
            told.get("content") or "",
            finish,
            first,
            tokens,
            self._logprobs.pop(index, None) or None,
            stop if finish is not None else None,
            reasoning,
            self._call_deltas(index, told.get("tool_calls") or ()),
        )

    def _call_deltas(self, index: int, calls: Sequence[Mapping[str, Any]]) -> list[CallDelta]:
        begun = self._calls.setdefault(index, set())
        deltas = []
        for call in calls:
            function = call.get("function") or {}
            number = call["index"]
            fresh = number not in begun and function.get("name") is not None
            if fresh:
                begun.add(number)
            deltas.append(
                CallDelta(
                    number,
                    str(call.get("id") or "") if fresh else None,
                    function["name"] if fresh else None,
                    function.get("arguments") or "",
                )
            )
        return deltas


class ProcessedGeneration(Generation):
    """One prompt at one worker, its output read by a chat processor.

    Args:
        output: The processor's, of this request.
        model, request, options, context, meter, clock, new_id, extras: As ``Generation`` takes them.
    """

    has_short_way = False

    def __init__(
        self,
        output: ChatOutput,
        model: ServedModel,
        request: dict[str, Any],
        options: OutputOptions,
        context: Context,
        meter: RequestMeter,
        clock: Clock,
        new_id: Callable[[], str],
        extras: ResponseExtras | None = None,
    ) -> None:
        super().__init__(model, request, options, context, meter, clock, new_id, extras)
        self._output = ProcessedOutput(output, options)
        self.pipeline = self._output

    def _read(self, arrived: Sequence[dict[str, Any]]) -> Read:
        before = self._output.generated
        deltas: list[Delta] = []
        failure: OutputError | None = None
        for frame in arrived:
            counted = self._output.generated
            try:
                made = self._output.push(frame)
            except OutputError as error:
                failure = error
                break
            if self.extras is not None:
                self.extras.take(frame, self._output.generated - counted, made[-1] if made else None)
            deltas += made
            if self._output.cut:
                break
        return deltas, self._output.generated - before, failure

"""From a decoded request to worker requests: check, render, tokenize. No asyncio."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo_es.clock import Clock
from dynamo_es.frontend.api_keys import Caller
from dynamo_es.frontend.capabilities import check_supported
from dynamo_es.frontend.chat_media import PromptMedia, check_urls, common_tokens, fetch_rules, media_of
from dynamo_es.frontend.chat_processing import ChatOutput
from dynamo_es.frontend.contracts import Family, ServedModel
from dynamo_es.frontend.conversation import template_messages, template_tools, template_variables
from dynamo_es.frontend.errors import ApiError, ModelNotFound, ModelNotReady, model_not_found, not_ready
from dynamo_es.frontend.pipeline import OutputOptions
from dynamo_es.frontend.preprocess import (
    check_prompt,
    check_prompt_ids,
    check_text_size,
    check_vocabulary,
    routing_of,
    stop_ids,
    stop_strings,
    worker_request,
)
from dynamo_es.frontend.reading_output import parsing_of
from dynamo_es.frontend.requests import ChatRequest, CompletionRequest
from dynamo_es.frontend.service import FrontendService
from dynamo_es.frontend.template import RenderError, RenderOverBudget
from dynamo_es.frontend.text_requests import text_request, written_request
from dynamo_es.frontend.validation import validate_chat, validate_completion

logger = logging.getLogger(__name__)

Request = ChatRequest | CompletionRequest

_EXCLUDE_TOOLS = "exclude_tools_when_tool_choice_none"
"""Member of a card's ``runtime_config``; unset counts as true."""


class Prepared(msgspec.Struct, frozen=True):
    """A request that is ready for workers.

    Attributes:
        request: As the client sent it.
        model: Whom it goes to.
        requests: One worker request a prompt.
        options: How its output is wanted.
        formatted_prompt: The rendered chat, for the annotation of that name; None without one.
        template_s, tokenize_s: Seconds that rendering and tokenizing took.
        open_output: Makes what reads the output, if a chat processor does; None: the frontend's own pipeline.
        media: Of a chat; None: it has none, or a worker that gets text looks at them.
    """

    request: Request
    model: ServedModel
    requests: list[dict[str, Any]]
    options: OutputOptions
    formatted_prompt: str | None
    template_s: float
    tokenize_s: float
    open_output: Callable[[], ChatOutput] | None = None
    media: PromptMedia | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(item.get("token_ids", ())) for item in self.requests)


@dataclass(slots=True)
class Admission:
    """Checks one request against the state of the service. ``model_name`` and ``stream`` tell what is known so far.

    Reads the directory, so it belongs to the event loop.
    """

    service: FrontendService
    family: Family
    caller: Caller | None = None
    model_name: str | None = None
    stream: bool = False

    def admit(self, request: Request, unknown: list[str]) -> ServedModel:
        """Stages 4 to 11 of spec/frontend.md 2.1: drain, readiness, fields, model.

        Raises:
            ApiError: The first stage that refuses.
        """
        model = self.enter(request.model, stream=bool(request.stream))
        if isinstance(request, ChatRequest):
            validate_chat(request, unknown)
        else:
            validate_completion(request, unknown)
        return self.accept(model)

    def enter(self, name: str, *, stream: bool = False) -> ServedModel | None:
        """Stages 4 and 5: drain, readiness. None: there is no model of this name, which is told after the fields.

        Raises:
            ApiError: 503.
        """
        self.stream = stream
        if self.service.draining:
            raise ApiError(503, "Service is not ready", code="draining")
        return self._find(name)

    def accept(self, model: ServedModel | None) -> ServedModel:
        """Stage 11: the model is there and serves this route.

        Raises:
            ApiError: 404.
        """
        if model is None or self.family not in model.families:
            raise model_not_found()
        return model.chat if model.chat is not None and self.family == "chat" else model

    def _find(self, name: str) -> ServedModel | None:
        if not name:
            return None
        directory = self.service.directory
        try:
            if self.caller is not None and not self.caller.may_ask(name, directory.primary_name(name)):
                return None
            model = directory.find(name)
        except ModelNotFound:
            return None
        except ModelNotReady as error:
            raise not_ready(error.name) from error
        if self.family in model.families:
            self.model_name = model.name
        return model


def prepare(request: Request, model: ServedModel, clock: Clock) -> Prepared:
    """Stage 12: render, tokenize, build the worker requests. Pure but for the clock; may run in a thread.

    Raises:
        ApiError: 400; the prompt cannot be made, does not fit the model, or its workers do not do what is asked for.
    """
    check_supported(request, model)
    if model.takes_text:
        if isinstance(request, ChatRequest) and model.card.details.get("media_fetcher") is not None:
            check_urls(media_of(request.messages), fetch_rules(model.card))
        options = OutputOptions(n=request.n or 1)
        return Prepared(request, model, [_text_request(request, model)], options, None, template_s=0.0, tokenize_s=0.0)
    check_vocabulary(request, model)
    start = clock.monotonic()
    media = media_of(request.messages) if isinstance(request, ChatRequest) else []
    if media:
        check_urls(media, fetch_rules(model.card))
    given = request.nvext.token_data if request.nvext is not None else None
    formatted = _render(request, model) if isinstance(request, ChatRequest) and not given else None
    rendered = clock.monotonic()
    prompts = _token_prompts(request, model, formatted, given)
    requests = [worker_request(request, model.name, model.tokenizer.eos_token_ids, prompt) for prompt in prompts]
    in_prompt = PromptMedia(media, _text_tokens(request, model, prompts[0])) if media else None
    if in_prompt is not None:
        in_prompt.add_to(requests[0])
    return Prepared(
        request=request,
        model=model,
        requests=requests,
        options=_options(request, model, formatted),
        formatted_prompt=formatted,
        template_s=rendered - start,
        tokenize_s=clock.monotonic() - rendered,
        media=in_prompt,
    )


def _text_tokens(request: Request, model: ServedModel, prompt: list[int]) -> int:
    """How many tokens come before the first medium: as many as the prompt has in common with one without media."""
    assert isinstance(request, ChatRequest)
    if request.nvext is not None and request.nvext.token_data:
        return 0
    try:
        text = _render(request, model, without_media=True)
    except ApiError:
        return 0  # Its template needs them.
    return common_tokens(prompt, model.tokenizer.encode(text, False))


def _text_request(request: Request, model: ServedModel) -> dict[str, Any]:
    """The request as it was written; where it is to go beside it, if it says so."""
    if model.as_written:
        return written_request(request)
    result = text_request(request)
    routing = routing_of(request.nvext, None) if request.nvext is not None else {}
    return result | {"routing": routing} if routing else result


def _token_prompts(
    request: Request, model: ServedModel, formatted: str | None, given: list[int] | None
) -> list[list[int]]:
    if given:
        return [_ids(given, model, "nvext")]
    if isinstance(request, ChatRequest):
        assert formatted is not None
        return [_tokenize(formatted, model, "messages")]
    return [
        _tokenize(item, model, "prompt") if isinstance(item, str) else _ids(item, model, "prompt")
        for item in _prompt_list(request.prompt)
    ]


def _render(request: ChatRequest, model: ServedModel, *, without_media: bool = False) -> str:
    renderer = model.renderer
    if renderer is None:
        raise ApiError(400, f"Model `{model.name}` has no chat template, use /v1/completions", param="model")
    try:
        return renderer.render(
            template_messages(request.messages, takes_parts=renderer.takes_parts, without_media=without_media),
            tools=template_tools(
                request, always=model.keeps_tools or model.card.runtime_config.get(_EXCLUDE_TOOLS) is False
            ),
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=bool(request.continue_final_message),
            variables=template_variables(request, model.default_thinking_mode),
        )
    except RenderOverBudget as error:
        logger.warning("model %s: %s", model.name, error)
        raise ApiError(400, "Invalid request", param="messages", code="template_error") from error
    except RenderError as error:
        if not media_of(request.messages):
            raise ApiError(400, "Invalid request", param="messages", code="template_error") from error
        hint = f"Validation: model `{model.name}` takes text only: its chat template has no place for other content"
        raise ApiError(400, "Invalid request", param="messages", code="unsupported_content", hint=hint) from error


def _tokenize(text: str, model: ServedModel, field: str) -> list[int]:
    check_text_size(model, text, field)
    token_ids = model.tokenizer.encode(text, False)
    if not token_ids:
        raise ApiError(400, "Validation: the prompt has no tokens", param=field, code="invalid_value")
    check_prompt(model, token_ids, field)
    return token_ids


def _ids(token_ids: list[int], model: ServedModel, field: str) -> list[int]:
    check_prompt_ids(token_ids, model, field)
    check_prompt(model, token_ids, field)
    return list(token_ids)


def _prompt_list(prompt: Any) -> list[Any]:
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    result: list[Any] = prompt
    return result


def _options(request: Request, model: ServedModel, formatted: str | None) -> OutputOptions:
    eos = () if request.ignore_eos else model.tokenizer.eos_token_ids
    logprobs = bool(request.logprobs) if isinstance(request, ChatRequest) else request.logprobs is not None
    return OutputOptions(
        stops=stop_strings(request),
        include_stop=bool(request.include_stop_str_in_output),
        stop_ids=frozenset((*eos, *stop_ids(request))),
        min_tokens=request.min_tokens or 0,
        skip_special_tokens=request.skip_special_tokens is not False,
        logprobs=logprobs,
        n=request.n or 1,
        parsing=parsing_of(request, model, formatted) if isinstance(request, ChatRequest) else None,
    )

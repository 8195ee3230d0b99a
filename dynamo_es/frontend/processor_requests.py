"""Worker requests of chat processors: from the request as JSON, with the defaults that they fill in. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo_es.errors import InvalidArgument
from dynamo_es.frontend.guidance import Constraint
from dynamo_es.frontend.pipeline import OutputOptions
from dynamo_es.frontend.preprocess import stop_ids, stop_strings, worker_request
from dynamo_es.frontend.requests import ChatRequest
from dynamo_es.frontend.utils import extract_mm_urls

_BY_PROCESSOR = ("messages", "tools", "tool_choice", "response_format", "guided_json", "guided_regex", "guided_choice",
                 "guided_grammar")  # fmt: skip
"""Members that the processor deals with itself."""
_SETTINGS = frozenset(ChatRequest.__struct_fields__) - {*_BY_PROCESSOR, "store", "metadata", "modalities", "audio",
                      "prediction", "web_search_options", "function_call", "functions", "user"}  # fmt: skip
_GREEDY: Mapping[str, Any] = {"temperature": 0.0}
"""Where no option is left open, no temperature at all is not the most likely token."""


def chat_settings(request: Mapping[str, Any]) -> ChatRequest:
    """How a request as JSON wants to be sampled and answered; what it says and which tools it has is left out.

    Raises:
        InvalidArgument: A member is of the wrong type; names it.
    """
    given = {name: value for name, value in request.items() if name in _SETTINGS and value is not None}
    try:
        return msgspec.convert({**given, "messages": []}, ChatRequest)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"Validation: {error}") from error


def processed_request(
    settings: ChatRequest,
    request: Mapping[str, Any],
    *,
    token_ids: list[int],
    eos_token_ids: Sequence[int],
    guided_decoding: Constraint | None,
    sampling_defaults: Mapping[str, Any],
) -> dict[str, Any]:
    """The worker request.

    Args:
        settings: ``chat_settings`` of the request.
        request: The client's, as JSON.
        token_ids: The prompt.
        eos_token_ids: Ids that end an answer.
        guided_decoding: What binds the output, or None.
        sampling_defaults: Sampling options where the request says none.
    """
    result = worker_request(settings, settings.model, eos_token_ids, token_ids)
    sampling = result["sampling_options"]
    greedy = settings.nvext is not None and settings.nvext.greed_sampling is True
    for name, value in {**sampling_defaults, **(_GREEDY if greedy else {})}.items():
        if sampling.get(name) is None:
            sampling[name] = value
    sampling["guided_decoding"] = guided_decoding
    conditions = result["stop_conditions"]
    conditions["min_tokens"] = conditions["min_tokens"] or 0
    conditions["ignore_eos"] = bool(conditions["ignore_eos"])
    media, uuids = extract_mm_urls(request.get("messages") or ())
    if media is not None:
        result["multi_modal_data"] = media
    if uuids is not None:
        result["multi_modal_uuids"] = uuids
    return result


def output_options(settings: ChatRequest, eos_token_ids: Sequence[int]) -> OutputOptions:
    """How the output is to be cut, for the pipeline that makes text of it."""
    eos = () if settings.ignore_eos else eos_token_ids
    return OutputOptions(
        stops=stop_strings(settings),
        include_stop=bool(settings.include_stop_str_in_output),
        stop_ids=frozenset((*eos, *stop_ids(settings))),
        min_tokens=settings.min_tokens or 0,
        skip_special_tokens=settings.skip_special_tokens is not False,
        logprobs=bool(settings.logprobs),
        n=settings.n or 1,
    )

"""From a valid request and its prompt's token ids to the request that a worker gets (spec/frontend.md 4.1). Pure.

Unset values are None: the frontend makes up no sampling defaults. Beyond Dynamo, ``logit_bias`` reaches the worker
(in ``sampling_options``), and ``echo`` and ``suffix`` do (in ``extra_args``).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from dynamo_es.frontend.contracts import ServedModel
from dynamo_es.frontend.errors import ApiError
from dynamo_es.frontend.forced_calls import forced_call_schema
from dynamo_es.frontend.requests import (
    ChatRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    NvExt,
)

_F32 = struct.Struct("<f")
_NO_EXTENSIONS = NvExt()


def single_precision(value: float | None) -> float | None:
    """The nearest 32-bit float: workers get what Dynamo's workers get (0.7 is 0.699999988079071)."""
    if value is None:
        return None
    result: float = _F32.unpack(_F32.pack(value))[0]
    return result


def check_prompt(model: ServedModel, token_ids: Sequence[int], field: str) -> None:
    """Refuse a prompt that cannot fit the model.

    Raises:
        ApiError: 400, ``context_length_exceeded``.
    """
    limit = model.card.context_length
    if 0 < limit < len(token_ids):
        raise context_length_exceeded(limit, str(len(token_ids)), field)


def check_text_size(model: ServedModel, text: str, field: str) -> None:
    """The same before tokenizing, for text that cannot fit however it is cut into tokens."""
    limit = model.card.context_length
    longest = model.tokenizer.max_token_chars
    if limit > 0 and longest is not None and len(text) > limit * longest:
        raise context_length_exceeded(limit, f"more than {len(text) // longest}", field)


def context_length_exceeded(limit: int, found: str, field: str) -> ApiError:
    """400 in OpenAI's words."""
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens. However, your prompt has {found} tokens. Please "
        "reduce the length of the prompt.",
        param=field,
        code="context_length_exceeded",
    )


def check_vocabulary(request: ChatRequest | CompletionRequest, model: ServedModel) -> None:
    """Refuse token ids that the model does not have: they can stop an engine.

    Raises:
        ApiError: 400 with the field.
    """
    size = model.tokenizer.vocab_size
    if request.logit_bias:
        _check_ids([int(key) for key in request.logit_bias], size, "logit_bias")
    for name in ("stop_token_ids", "allowed_token_ids"):
        value = getattr(request, name)
        if value:
            _check_ids(value, size, name)
    for ids in request.bad_words_token_ids or ():
        _check_ids(ids, size, "bad_words_token_ids")


def check_prompt_ids(token_ids: Sequence[int], model: ServedModel, field: str) -> None:
    """The same for a prompt that came as token ids."""
    _check_ids(token_ids, model.tokenizer.vocab_size, field)


def _check_ids(token_ids: Sequence[int], size: int, field: str) -> None:
    largest = max(token_ids, default=0)
    if largest >= size:
        raise ApiError(
            400,
            f"Validation: token id {largest} in `{field}` is outside of the model's vocabulary of {size}",
            param=field,
            code="invalid_value",
        )


def worker_request(
    request: ChatRequest | CompletionRequest, model: str, eos_token_ids: Sequence[int], token_ids: list[int]
) -> dict[str, Any]:
    """The preprocessed request, a fresh mapping that the engine may change.

    Args:
        request: Valid request.
        model: Whom it goes to, by its primary name.
        eos_token_ids: Ids that end its answers.
        token_ids: The prompt.
    """
    extension = request.nvext or _NO_EXTENSIONS
    eos = [] if request.ignore_eos else list(eos_token_ids)
    result: dict[str, Any] = {
        "model": model,
        "token_ids": token_ids,
        "stop_conditions": _stop_conditions(request, extension, eos),
        "sampling_options": _sampling_options(request, extension),
        "output_options": _output_options(request),
        "eos_token_ids": eos,
        "annotations": extension.annotations or [],
        "routing": routing_of(extension, _cache_salt(request, extension)),
        "router_config_override": None,
    }
    extra = _extra_args(request, extension)
    if extra:
        result["extra_args"] = extra
    if extension.request_timestamp_ms is not None:
        result["request_timestamp_ms"] = extension.request_timestamp_ms
    if extension.router is not None:
        result["router"] = msgspec.to_builtins(extension.router)
    if isinstance(request, ChatRequest):
        for name in ("mm_processor_kwargs", "media_io_kwargs"):
            if getattr(request, name) is not None:
                result[name] = getattr(request, name)
    return result


def stop_strings(request: ChatRequest | CompletionRequest) -> list[str]:
    """Stop strings that are in force; none with ``ignore_eos``."""
    stop = request.stop
    if stop is None or request.ignore_eos:
        return []
    return [stop] if isinstance(stop, str) else [item for item in stop if isinstance(item, str)]


def stop_ids(request: ChatRequest | CompletionRequest) -> list[int]:
    """Stop token ids of the client that are in force; none with ``ignore_eos``."""
    if request.ignore_eos:
        return []
    given = request.stop if isinstance(request.stop, list) else ()
    return [*(item for item in given if isinstance(item, int)), *(request.stop_token_ids or ())]


def _stop_conditions(request: ChatRequest | CompletionRequest, extension: NvExt, eos: list[int]) -> dict[str, Any]:
    max_tokens = request.max_tokens
    thinking = extension.max_thinking_tokens
    if isinstance(request, ChatRequest):
        if request.max_completion_tokens is not None:
            max_tokens = request.max_completion_tokens
        if request.thinking_token_budget is not None:
            thinking = request.thinking_token_budget
    return {
        "max_tokens": max_tokens,
        "stop": stop_strings(request) or None,
        "stop_token_ids": stop_ids(request) or None,
        "stop_token_ids_visible": None,
        "stop_token_ids_hidden": eos or None,
        "min_tokens": request.min_tokens,
        "ignore_eos": request.ignore_eos,
        "max_thinking_tokens": thinking,
    }


def _sampling_options(request: ChatRequest | CompletionRequest, extension: NvExt) -> dict[str, Any]:
    greedy = extension.greed_sampling is True
    top_k = -1 if request.top_k == 0 else request.top_k
    result: dict[str, Any] = {
        "n": request.n,
        "best_of": request.best_of if isinstance(request, CompletionRequest) else None,
        "presence_penalty": single_precision(request.presence_penalty),
        "frequency_penalty": single_precision(request.frequency_penalty),
        "repetition_penalty": single_precision(request.repetition_penalty),
        "temperature": None if greedy else single_precision(request.temperature),
        "top_p": None if greedy else single_precision(request.top_p),
        "top_k": None if greedy else top_k,
        "min_p": None if greedy else single_precision(request.min_p),
        "length_penalty": None,
        "use_beam_search": None,
        "seed": request.seed,
        "include_stop_str_in_output": request.include_stop_str_in_output,
        "guided_decoding": _guided_decoding(request),
    }
    if request.logit_bias:
        result["logit_bias"] = {key: float(value) for key, value in request.logit_bias.items()}
    return result


def _guided_decoding(request: ChatRequest | CompletionRequest) -> dict[str, Any] | None:
    result: dict[str, Any] = {}
    form = request.response_format if isinstance(request, ChatRequest) else None
    forced = forced_call_schema(request) if isinstance(request, ChatRequest) else None
    if forced is not None:
        return _with_backend({"json": forced}, request)
    if isinstance(form, JsonObjectFormat):
        result["json"] = {"type": "object"}
    elif isinstance(form, JsonSchemaFormat):
        result["json"] = form.json_schema.schema
    elif request.guided_json is not None:
        result["json"] = request.guided_json
    if request.guided_regex is not None:
        result["regex"] = request.guided_regex
    if request.guided_choice:
        result["choice"] = request.guided_choice
    if request.guided_grammar is not None:
        result["grammar"] = request.guided_grammar
    return _with_backend(result, request) if result else None


def _with_backend(guided: dict[str, Any], request: ChatRequest | CompletionRequest) -> dict[str, Any]:
    if request.guided_decoding_backend is not None:
        guided["backend"] = request.guided_decoding_backend
    if request.guided_whitespace_pattern is not None:
        guided["whitespace_pattern"] = request.guided_whitespace_pattern
    return guided


def _output_options(request: ChatRequest | CompletionRequest) -> dict[str, Any]:
    logprobs: int | None
    prompt_logprobs = request.prompt_logprobs
    if isinstance(request, ChatRequest):
        top = 1 if request.top_logprobs is None else request.top_logprobs
        logprobs = top if request.logprobs else None
    else:
        logprobs = request.logprobs
        if request.echo and logprobs is not None and prompt_logprobs is None:
            prompt_logprobs = 1
    return {
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "skip_special_tokens": request.skip_special_tokens,
        "formatted_prompt": None,
        "return_tokens_as_token_ids": request.return_tokens_as_token_ids,
    }


def routing_of(extension: NvExt, cache_salt: str | None) -> dict[str, Any]:
    """What a request says about where it should go; what is not said is left out."""
    hints = extension.agent_hints
    given: dict[str, Any] = {
        "backend_instance_id": extension.backend_instance_id,
        "decode_worker_id": extension.decode_worker_id,
        "prefill_worker_id": extension.prefill_worker_id,
        "dp_rank": extension.dp_rank,
        "prefill_dp_rank": extension.prefill_dp_rank,
        "cache_salt": cache_salt,
        "routing_constraints": extension.routing_constraints,
    }
    if hints is not None:
        jump = hints.latency_sensitivity if hints.priority is None else float(max(hints.priority, 0))
        given |= {
            "priority": hints.priority,
            "priority_jump": jump,
            "strict_priority": hints.strict_priority,
            "expected_output_tokens": hints.osl,
        }
    return {name: value for name, value in given.items() if value is not None}


def _cache_salt(request: ChatRequest | CompletionRequest, extension: NvExt) -> str | None:
    salt: str | None = request.cache_salt
    return extension.cache_salt if extension.cache_salt is not None else salt


def _extra_args(request: ChatRequest | CompletionRequest, extension: NvExt) -> dict[str, Any]:
    result: dict[str, Any] = {}
    forwarded = {
        "cache_salt": _cache_salt(request, extension),
        "extra_fields": extension.extra_fields,
        "metadata_upload": extension.metadata_upload,
    }
    forwarded = {name: value for name, value in forwarded.items() if value is not None}
    if forwarded:
        result["nvext"] = forwarded
    names = ("allowed_token_ids", "bad_words_token_ids", "detokenize")
    sampling = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
    if sampling:
        result["sampling_options"] = sampling
    if isinstance(request, CompletionRequest):
        if request.echo:
            result["echo"] = True
        if request.suffix is not None:
            result["suffix"] = request.suffix
    return result

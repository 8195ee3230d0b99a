"""Refuses requests that can never fit. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dynamo_es.engines.request_parts import section
from dynamo_es.errors import InvalidArgument


def check_length(
    request: Mapping[str, Any], room: Callable[[int], int], context_length: int, cache_tokens: int
) -> None:
    """Refuse a request that can never fit, with the limit, what it asks for and what would fit.

    Args:
        request: Preprocessed request.
        room: Output tokens that fit, by the prompt's length.
        context_length: Tokens of the model's context; 0: unknown.
        cache_tokens: Tokens of a rank's KV cache.

    Raises:
        InvalidArgument: As vLLM does, also if the prompt alone would fit; ``max_tokens`` is not cut in silence.
    """
    token_ids = request.get("token_ids")
    if not isinstance(token_ids, list):
        return  # The engine says what is wrong.
    prompt = len(token_ids)
    max_tokens = section(request, "stop_conditions").get("max_tokens")
    fitting = room(prompt)
    if fitting >= (max_tokens or 1):
        return
    limit = f"the model's context of {context_length} tokens"
    if not context_length or cache_tokens < context_length:
        limit = f"the worker's KV cache of {cache_tokens} tokens"
    asked = "" if max_tokens is None else f" and max_tokens is {max_tokens}"
    advice = f"ask for at most {fitting} tokens" if fitting >= 1 else "shorten the prompt"
    raise InvalidArgument(f"The request does not fit {limit}: its prompt has {prompt} tokens{asked}; {advice}.")

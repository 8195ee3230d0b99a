"""What a model's workers say that they cannot honour: requests that ask for it are refused, not served without. Pure.

A worker's card may hold ``runtime_config["unsupported_fields"]``: names of request fields, each with the reason. It is
read here so that the client gets its 400 before a stream begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from dynamo_es.frontend.contracts import ServedModel
from dynamo_es.frontend.errors import ApiError
from dynamo_es.frontend.requests import (
    ChatRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
)

UNSUPPORTED_FIELDS = "unsupported_fields"
_MAX_REASON = 200

Request = ChatRequest | CompletionRequest


def check_supported(request: Request, model: ServedModel) -> None:
    """Refuse a request that asks for what the model's workers do not do.

    Raises:
        ApiError: 400, ``unsupported_parameter``, with the field.
    """
    unsupported = model.card.runtime_config.get(UNSUPPORTED_FIELDS)
    if not isinstance(unsupported, dict):
        return
    for field, why in unsupported.items():
        if field in _FIELDS and _asks_for(request, field):
            raise ApiError(
                400,
                f"Validation: `{field}` is not supported by model `{model.name}`: {str(why)[:_MAX_REASON]}",
                param=field,
                code="unsupported_parameter",
            )


_FIELDS = frozenset((*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__))


def _asks_for(request: Request, field: str) -> bool:
    value = getattr(request, field, None)
    if value is None:
        return False
    special = _SPECIAL.get(field)
    if special is not None:
        return special(request, value)
    if isinstance(value, msgspec.Raw):
        return bytes(value) not in (b"", b"null", b"{}", b"[]")
    return value is not False and value not in ("", [], {})


def _asks_for_modalities(request: Request, value: msgspec.Raw) -> bool:
    return bool(bytes(value)) and msgspec.json.decode(bytes(value)) not in (None, [], ["text"])


_SPECIAL: Mapping[str, Callable[[Any, Any], bool]] = {
    "n": lambda request, value: value > 1,
    "best_of": lambda request, value: value != (request.n or 1),
    "logprobs": lambda request, value: value is not False,
    "response_format": lambda request, value: isinstance(value, JsonObjectFormat | JsonSchemaFormat),
    "tool_choice": lambda request, value: value == "required" or isinstance(value, NamedTool),
    "detokenize": lambda request, value: value is False,
    "modalities": _asks_for_modalities,
}
"""Fields of which some values ask for nothing more than the default does."""

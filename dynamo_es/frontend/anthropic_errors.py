"""Errors in the form that Anthropic's clients read (spec/frontend.md 1.9). Pure.

Members of the frontend's other error shapes stand beside Anthropic's, so that a tool that reads those finds them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo_es.frontend.errors import OVERLOADED, ApiError

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}
_FIELDS = {"stop": "stop_sequences", "response_format": "output_config", "reasoning_effort": "output_config"}
"""Fields of chat requests by the names that they have here."""
_MODEL_NOT_FOUND = "model_not_found"


def error_body(error: ApiError, status: int, model: str | None) -> bytes:
    """The body of a refusal that is sent with ``status``; ``model``: what the client asked for, if it is known."""
    error = error.in_terms_of(_FIELDS)
    message = (error.hint or error.message).removeprefix("Validation: ")
    if error.code == _MODEL_NOT_FOUND and model is not None:
        message = f"Model '{model[:256]}' not found"
    elif message.startswith("Maximum of "):
        message = f"InvalidRequest: {message}"
    value = {**error_value(error.status, message), "param": error.param, "code": error.code}
    return msgspec.json.encode({"type": "error", "error": value, "message": message, "code": status})


def error_value(status: int, message: str) -> dict[str, Any]:
    """Anthropic's type and message."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": kind, "message": message}

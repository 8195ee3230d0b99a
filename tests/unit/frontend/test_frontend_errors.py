from __future__ import annotations

import json

import pytest
from prometheus_client import CollectorRegistry

from dynamo_es import errors
from dynamo_es.frontend.errors import ApiError, HttpError, error_of_engine
from dynamo_es.frontend.faults import describe
from dynamo_es.frontend.metrics import FrontendMetrics


def test_http_error_is_that_of_dynamo() -> None:
    error = HttpError(404, "x")
    assert (error.code, str(error), error.args) == (404, "HTTP 404: x", ("HTTP 404: x",))
    assert not isinstance(error, errors.DynamoException)
    with pytest.raises(ValueError, match="HttpError status code must be an integer"):
        HttpError(True, "x")
    assert len(HttpError(404, "x" * 8193).message) == 8192
    assert HttpError(404, "x" * 8193).message.endswith("xx...")
    assert len(HttpError(404, "x" * 8192).message) == 8192


@pytest.mark.parametrize(
    ("error", "status", "message", "stream"),
    [
        (errors.InvalidArgument("bad arg"), 400, "bad arg", ("invalid_request_error", 400, "bad arg")),
        (errors.CannotConnect("x"), 503, "Service temporarily unavailable", ("service_unavailable", 503, None)),
        (errors.ConnectionTimeout("x"), 504, "Request deadline exceeded", ("timeout_error", 504, None)),
        (errors.Cancelled("x"), 499, "Request cancelled", ("request_cancelled", 499, None)),
        (errors.Unknown("x"), 500, "Internal server error", ("internal_server_error", 500, None)),
        (ValueError("x"), 400, "Invalid request", ("invalid_request_error", 400, "Invalid request")),
        (HttpError(429, "x"), 429, "Too Many Requests", ("rate_limit_error", 429, "Rate limit exceeded")),
        (HttpError(422, "x"), 400, "Bad Request", ("invalid_request_error", 400, "Invalid request")),
        (HttpError(502, "x"), 500, "Internal server error", ("internal_server_error", 502, "Bad gateway")),
        (HttpError(529, "x"), 529, "Service temporarily overloaded", ("service_unavailable", 529, None)),
        (HttpError(200, "x"), 500, "Internal server error", ("internal_server_error", 500, None)),
    ],
)
def test_errors_of_engines(error: Exception, status: int, message: str, stream: tuple[str, int, str | None]) -> None:
    shown = error_of_engine(error, started=False)
    assert (shown.status, shown.message) == (status, message)
    frame = json.loads(shown.frame()[6:])["error"]
    assert (frame["type"], frame["code"]) == stream[:2]
    assert frame["message"] == (stream[2] or message)


def test_body_has_the_members_of_both_shapes_in_order() -> None:
    body = ApiError(404, "Model not found", param="model", code="model_not_found").body()
    assert body == (
        b'{"message":"Model not found","type":"Not Found","code":404,"error":{"message":"Model not found",'
        b'"type":"not_found_error","param":"model","code":"model_not_found"}}'
    )


def test_description_for_logs_has_no_message() -> None:
    try:
        raise RuntimeError("secret")
    except RuntimeError as error:
        text = describe(error)
    assert text.startswith("RuntimeError at test_frontend_errors.py:")
    assert "secret" not in text


def test_model_that_left_is_forgotten() -> None:
    metrics = FrontendMetrics(CollectorRegistry())
    metrics.model("m").started("chat_completions", "unary")
    metrics.finished("chat_completions", "m", "unary", 200)
    assert b'active_requests{model="m"}' in metrics.text()
    metrics.forget("m")
    assert b'active_requests{model="m"}' not in metrics.text()
    metrics.model("m")
    assert b'active_requests{model="m"}' in metrics.text()

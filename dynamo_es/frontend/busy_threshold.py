"""``GET`` and ``POST /busy_threshold``: above what workers count as busy, by model (spec/frontend.md 1.6).

An operator's route. Its errors are Dynamo's, ``error`` is their text; the flat members stand beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Request, Response
from msgspec import Meta

from dynamo_es.frontend import serde
from dynamo_es.frontend.contracts import ModelDirectory
from dynamo_es.frontend.errors import ApiError, ModelNotFound, reason_phrase
from dynamo_es.frontend.headers import read_headers
from dynamo_es.frontend.openapi import responses
from dynamo_es.frontend.reading import (
    ClientGone,
    RequestKind,
    check_content_type,
    decode_request,
    encoded_body,
    read_body,
)
from dynamo_es.frontend.service import FrontendService
from dynamo_es.frontend.siblings import ThresholdsSet
from dynamo_es.frontend.validation import number_text
from dynamo_es.router.overload import BusyThresholds

PATH = "/busy_threshold"
METHODS = "GET,HEAD,POST"
_MAX_BODY_MB = 1
_SILENCE_S = 60.0
"""How long a client may send nothing amid its body."""
_Tokens = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class ThresholdRequest(msgspec.Struct):
    """Body of ``POST /busy_threshold``; what is null stays as it is, other members are dropped."""

    model: str
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: _Tokens | None = None
    active_prefill_tokens_threshold_frac: float | None = None


def threshold_kind() -> RequestKind[ThresholdRequest]:
    """Bodies of ``POST /busy_threshold``."""
    return RequestKind(
        ThresholdRequest,
        msgspec.json.Decoder(ThresholdRequest),
        frozenset(ThresholdRequest.__struct_fields__),
        (),
        {
            "model": serde.typed(str, "a string", null=False),
            "active_decode_blocks_threshold": serde.typed((int, float), "f64"),
            "active_prefill_tokens_threshold": serde.integer(0, 2**63 - 1, "u64"),
            "active_prefill_tokens_threshold_frac": serde.typed((int, float), "f64"),
        },
        ("model",),
        "BusyThresholdRequest",
        plain=True,
        by_path=True,
    )


def change_thresholds(directory: ModelDirectory, request: ThresholdRequest) -> dict[str, Any]:
    """Set what is not null, and give the result; with nothing set, only that.

    Raises:
        ApiError: 400 out of range, 404 for a model that nobody registered.
    """
    blocks, fraction = request.active_decode_blocks_threshold, request.active_prefill_tokens_threshold_frac
    if blocks is not None and not 0 <= blocks <= 1:
        shown = number_text(blocks)
        raise ApiError(400, f"active_decode_blocks_threshold must be between 0.0 and 1.0, got {shown}")
    if fraction is not None and not (math.isfinite(fraction) and fraction >= 0):
        raise ApiError(
            400,
            "active_prefill_tokens_threshold_frac must be a finite value greater than or equal to 0.0, "
            f"got {number_text(fraction)}",
        )
    asked = BusyThresholds(blocks, request.active_prefill_tokens_threshold, fraction)
    try:
        name = directory.primary_name(request.model)
    except ModelNotFound as error:
        if asked.any_set:
            text = f"Model '{request.model}' not found. Thresholds can only be set for discovered models."
            raise ApiError(404, text) from error
        return shown_thresholds(request.model, BusyThresholds())
    known = directory.thresholds()[name]
    if asked.any_set:
        known = BusyThresholds(
            _newer(asked.active_decode_blocks, known.active_decode_blocks),
            _newer(asked.active_prefill_tokens, known.active_prefill_tokens),
            _newer(asked.active_prefill_tokens_frac, known.active_prefill_tokens_frac),
        )
        directory.set_thresholds(name, known)
    return shown_thresholds(request.model, known)


def _newer(asked: Any, known: Any) -> Any:
    return known if asked is None else asked


def shown_thresholds(model: str, thresholds: BusyThresholds) -> dict[str, Any]:
    """One model's entry."""
    return {
        "model": model,
        "active_decode_blocks_threshold": thresholds.active_decode_blocks,
        "active_prefill_tokens_threshold": thresholds.active_prefill_tokens,
        "active_prefill_tokens_threshold_frac": thresholds.active_prefill_tokens_frac,
    }


async def tell_siblings(service: FrontendService, changed: ThresholdRequest) -> None:
    """Other processes on this port have the same thresholds."""
    if service.siblings is not None and changed != ThresholdRequest(changed.model):
        name = service.directory.primary_name(changed.model)
        await service.siblings.ask(ThresholdsSet(name, service.directory.thresholds()[name]))


def add_busy_threshold(app: FastAPI, service: FrontendService) -> None:
    """Add the route in both methods."""
    kind = threshold_kind()
    directory = service.directory

    @app.get(PATH, tags=["operations"], summary="Busy thresholds of all models", responses=responses())
    async def get_thresholds() -> Response:
        entries = [shown_thresholds(name, thresholds) for name, thresholds in directory.thresholds().items()]
        return _json({"thresholds": entries}, 200)

    @app.post(
        PATH,
        tags=["operations"],
        summary="Set the busy thresholds of a model",
        responses=responses(400, 404, 408, 413, 415, 422, error=False),
        openapi_extra={"requestBody": _BODY},
    )
    async def post_thresholds(request: Request) -> Response:
        given = read_headers(request.scope["headers"])
        try:
            check_content_type(given.content_type, by_path=True)
            if given.encoded:
                raise encoded_body()
            body = await read_body(request.receive, given.content_length, _MAX_BODY_MB, _SILENCE_S)
            asked = decode_request(body, kind)[0]
            result = change_thresholds(directory, asked)
            await tell_siblings(service, asked)
            return _json(result, 200)
        except ClientGone:
            return Response(status_code=400)
        except ApiError as error:
            return _refused(error)


_BODY = {
    "required": True,
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["model"],
                "properties": {
                    "model": {"type": "string"},
                    "active_decode_blocks_threshold": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
                    "active_prefill_tokens_threshold": {"type": ["integer", "null"], "minimum": 0},
                    "active_prefill_tokens_threshold_frac": {"type": ["number", "null"], "minimum": 0},
                },
            }
        }
    },
}


def _refused(error: ApiError) -> Response:
    # JSON of the wrong shape is unprocessable here; broken JSON is a bad request, as everywhere.
    status = 422 if error.code == "invalid_body" else error.status
    flat = {"message": error.message, "type": reason_phrase(status), "code": status}
    return _json({"error": error.message, **flat}, status)


def _json(value: Mapping[str, Any], status: int) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")

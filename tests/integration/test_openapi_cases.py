"""Requests that are made from ``/openapi.json``: no answer but those it lists, in the forms that it tells.

A few cases of each route by default, right and wrong ones; ``DYN_ES_API_CASES=320`` runs ten thousand in all.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from dynamo_es.config.tree import FrontendConfig
from dynamo_es.frontend.asgi import FrontendApp
from dynamo_es.frontend.contracts import ServedModel
from dynamo_es.frontend.route_extensions import FrontendRoute
from dynamo_es.frontend.servable import NoTokenizer
from dynamo_es.runtime.context import Context
from tests.unit.frontend.asgi_client import call
from tests.unit.frontend.fakes import ScriptedEngine, application, card, frame, says, served

CASES = int(os.environ.get("DYN_ES_API_CASES", "4"))
CHECKS: list[Any] = [
    status_code_conformance,
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
]
USAGE = {"prompt_tokens": 3, "total_tokens": 3}
LABEL = {"index": 0, "label": "P", "probs": [1.0], "num_classes": 1}
ANSWERS: dict[str, Any] = {
    "Embedding": {
        "object": "list",
        "model": "m",
        "data": [{"index": 0, "object": "embedding", "embedding": [0.1]}],
        "usage": USAGE,
    },
    "Classify": {"id": "c", "object": "list", "created": 5, "model": "m", "data": [LABEL], "usage": USAGE},
    "Images": {"created": 1, "data": [{"url": "http://x/y.png"}]},
}
# What the frontend has no excuse for; 501 and 503 are answers of their own.
FAULTS = (500, 502, 504)


class Fixed:
    """A worker that answers everything with one item."""

    def __init__(self, item: Any) -> None:
        self._item = item

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncGenerator[list[Any], None]:
        yield [self._item]


@pytest.fixture(scope="module")
def app() -> Iterator[FrontendApp]:
    others = [
        ServedModel(kind, card(kind, model_type=kind, model_input="Text"), NoTokenizer(), None, Fixed(answer), 0)
        for kind, answer in ANSWERS.items()
    ]
    text = served(ScriptedEngine(says(frame("Hi"), frame(" there", "stop"))))
    config = FrontendConfig(enable_anthropic_api=True, overload_status_code=507)
    extension = FrontendRoute("GET", "/ext", lambda context: context.is_ready())
    with ThreadPoolExecutor(1) as executor:
        yield application(text, *others, executor=executor, config=config, extensions=[extension])


def model_of(path: str) -> str:
    kinds = {"/v1/embeddings": "Embedding", "/v1/classify": "Classify", "/v1/images": "Images"}
    return next((kind for start, kind in kinds.items() if path.startswith(start)), "m")


def modes_of(operation: Any) -> list[GenerationMode]:
    """What is generated: requests as they are described, and such that break the description of their body."""
    return list(GenerationMode) if operation.body else [GenerationMode.POSITIVE]


def test_every_answer_is_one_that_is_described(app: FrontendApp) -> None:
    document = schemathesis.openapi.from_asgi("/openapi.json", app)
    statuses: set[int] = set()
    operations = [result.ok() for result in document.get_all_operations()]
    for operation, mode in [(each, mode) for each in operations for mode in modes_of(each)]:

        @settings(
            max_examples=CASES, deadline=None, database=None, derandomize=CASES < 100, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = model_of(case.path)
            answer = case.call()
            statuses.add(answer.status_code)
            assert answer.status_code not in FAULTS, answer.text
            case.validate_response(answer, checks=CHECKS)

        check()
    assert {200, 400, 404, 501} <= statuses


async def test_the_description_lists_what_routes_answer(app: FrontendApp) -> None:
    document = (await call(app, "/openapi.json", method="GET")).json()

    def answers(method: str, path: str) -> set[str]:
        return set(document["paths"][path][method]["responses"])

    of_keys = {"401", "403", "429"}
    inference = {"200", "400", "404", "408", "413", "415", "431", "500", "501", "503", "504", "507", "4XX"} | of_keys
    assert answers("post", "/v1/chat/completions") == inference
    assert answers("get", "/v1/realtime") == inference
    assert answers("get", "/health") == {"200", "503"} | of_keys
    assert answers("get", "/v1/models") == {"200"} | of_keys
    assert answers("get", "/v1/models/{model_id}") == {"200", "404", "503"} | of_keys
    assert {"408", "413", "415", "422"} <= answers("post", "/busy_threshold")
    assert answers("get", "/ext") == {"200", "default"}
    assert "text/plain" in document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    schemas = document["components"]["schemas"]
    assert {"Error", "AnthropicError"} <= set(schemas)
    assert "HTTPValidationError" not in schemas
    refusal = document["paths"]["/v1/messages"]["post"]["responses"]["400"]["content"]["application/json"]
    assert refusal["schema"] == {"$ref": "#/components/schemas/AnthropicError"}

"""``/busy_threshold``: reading, setting, refusing; more of its errors are among the recorded answers."""

from __future__ import annotations

import json
from concurrent.futures import Executor

import pytest

from dynamo_es.config.tree import FrontendConfig
from dynamo_es.frontend.contracts import ServedModel
from tests.unit.frontend.asgi_client import Reply, call
from tests.unit.frontend.fakes import ScriptedEngine, application, says, served

PATH = "/busy_threshold"


@pytest.fixture
def models() -> list[ServedModel]:
    return [served(ScriptedEngine(says()), name=name) for name in ("a", "b")]


async def post(app: object, body: object, **headers: str) -> Reply:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await call(app, PATH, data, headers={"content-type": "application/json", **headers})  # type: ignore[arg-type]


async def test_values_are_set_one_by_one_and_null_changes_nothing(
    executor: Executor, models: list[ServedModel]
) -> None:
    app = application(*models, executor=executor, aliases={"al": "a"})
    await post(app, {"model": "al", "active_decode_blocks_threshold": 0.5})
    second = await post(app, {"model": "a", "active_prefill_tokens_threshold": 7})
    expected = {
        "model": "a",
        "active_decode_blocks_threshold": 0.5,
        "active_prefill_tokens_threshold": 7,
        "active_prefill_tokens_threshold_frac": None,
    }
    assert second.json() == expected
    unchanged = await post(app, {"model": "al", "active_decode_blocks_threshold": None})
    assert unchanged.json() == {**expected, "model": "al"}
    listed = (await call(app, PATH, method="GET")).json()["thresholds"]
    assert [entry["model"] for entry in listed] == ["a", "b"]
    assert listed[0] == expected
    assert listed[1]["active_decode_blocks_threshold"] is None


async def test_reading_an_unknown_model_gives_nulls_and_setting_it_is_refused(
    executor: Executor, models: list[ServedModel]
) -> None:
    app = application(*models, executor=executor)
    read = await post(app, {"model": ""})
    assert (read.status, read.json()["active_prefill_tokens_threshold"]) == (200, None)
    refused = await post(app, {"model": "zz", "active_prefill_tokens_threshold": 1})
    assert (refused.status, refused.json()["code"]) == (404, 404)
    assert refused.json()["error"] == refused.json()["message"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": "a", "active_decode_blocks_threshold": -0.1}, 400),
        ({"model": "a", "active_prefill_tokens_threshold_frac": -1}, 400),
        ({"model": "a", "active_prefill_tokens_threshold": -1}, 422),
        ({"model": "a", "active_prefill_tokens_threshold": 1.5}, 422),
        ({"model": "a", "active_prefill_tokens_threshold": "1"}, 422),
        ({"model": 1}, 422),
        ({}, 422),
        ([], 422),
        (b"{", 400),
        (b'{"model": "a", "active_decode_blocks_threshold": NaN}', 400),
        (b" " * (2**20 + 1), 413),
    ],
)
async def test_wrong_bodies_are_refused_and_change_nothing(
    body: object, status: int, executor: Executor, models: list[ServedModel]
) -> None:
    app = application(*models, executor=executor)
    before = (await call(app, PATH, method="GET")).text
    reply = await post(app, body)
    assert (reply.status, reply.json()["code"]) == (status, status)
    assert isinstance(reply.json()["error"], str)
    assert (await call(app, PATH, method="GET")).text == before


async def test_other_methods_types_and_a_switched_off_route(executor: Executor, models: list[ServedModel]) -> None:
    app = application(*models, executor=executor)
    wrong = await call(app, PATH, method="DELETE")
    assert (wrong.status, wrong.headers["allow"]) == (405, "GET,HEAD,POST")
    text = await call(app, PATH, b"{}", headers={"content-type": "text/plain"})
    assert (text.status, text.json()["error"]) == (415, "Expected request with `Content-Type: application/json`")
    assert (await call(app, PATH, method="HEAD")).status == 200
    config = FrontendConfig(http_host="127.0.0.1", http_port=0, disable_admin_api=True)
    off = application(*models, executor=executor, config=config)
    assert (await call(off, PATH, method="GET")).status == 404
    assert (await post(off, {"model": "a"})).json()["message"] == "Route not found: POST /busy_threshold"
    assert PATH not in (await call(off, "/openapi.json", method="GET")).json()["paths"]

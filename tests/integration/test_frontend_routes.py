"""Routes beside chat and completions over real workers: registration, routing, events, busy thresholds."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynamo_es.config.tree import FrontendConfig, WorkerConfig
from dynamo_es.router.routing_request import RoutingRequest
from tests.support.runtimes import wait_for
from tests.support.served_fleet import CHAT, COMPLETIONS, ServedFleet, served_fleet
from tests.unit.frontend.asgi_client import Reply, call

EMBEDDINGS = "/v1/embeddings"
USAGE = {"prompt_tokens": 1, "total_tokens": 1, "completion_tokens": 0}
CLASSIFIED = {
    "id": "c",
    "object": "list",
    "created": 1,
    "model": "c",
    "data": [{"index": 0, "label": "a", "probs": [1.0], "num_classes": 1}],
    "usage": USAGE,
}


@pytest.fixture
async def fleet() -> AsyncIterator[ServedFleet]:
    async with served_fleet() as running:
        yield running


async def post(fleet: ServedFleet, path: str, **body: Any) -> Reply:
    return await call(fleet.app, path, json.dumps(body).encode())


async def test_mock_worker_serves_embeddings_that_are_booked_and_released(fleet: ServedFleet) -> None:
    await fleet.mock_worker(WorkerConfig(model_name="e"), num_workers=2, model_type="embedding", embedding_dimensions=8)
    answers = [(await post(fleet, EMBEDDINGS, model="e", input=["one", "two", "one"])).json() for _ in range(6)]
    vectors = [entry["embedding"] for entry in answers[0]["data"]]
    assert [len(vector) for vector in vectors] == [8, 8, 8]
    assert vectors[0] == vectors[2] != vectors[1]
    assert all(answer == answers[0] for answer in answers)
    assert answers[0]["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    events = await fleet.finished(6)
    assert {event.outcome for event in events} == {"ok"}
    (_, engine), *_ = fleet.models.routers()
    # The KV cache holds nothing of embeddings: even in KV mode they go to who has least to do.
    assert engine.router.chooser.mode == "least-loaded"
    assert engine.router.open_requests == 0
    # It serves nothing else.
    assert (await post(fleet, CHAT, model="e", messages=[{"role": "user", "content": "x"}])).status == 404


async def test_worker_that_makes_no_embeddings_says_so(fleet: ServedFleet) -> None:
    await fleet.mock_worker(WorkerConfig(model_name="m"))
    reply = await post(fleet, EMBEDDINGS, model="m", input="x")
    assert (reply.status, reply.json()["error"]["code"]) == (404, "model_not_found")


async def test_text_worker_gets_the_request_with_the_models_name(fleet: ServedFleet) -> None:
    requests = await fleet.scripted_worker(
        [[CLASSIFIED]], "c", model_input="Text", model_type="Classify | Pooling", source_path="/nowhere", aliases=["cc"]
    )
    reply = await post(
        fleet, "/v1/classify", model="cc", input="x", use_activation=False, truncate_prompt_tokens=5, foo=1
    )
    assert (reply.status, reply.json()) == (200, CLASSIFIED)
    known = {name: value for name, value in requests[0].items() if name not in ("routing", "request_id")}
    assert known == {
        "model": "c",
        "input": "x",
        "priority": 0,
        "use_activation": False,
        "truncate_prompt_tokens": 5,
    }
    listed = (await fleet.get("/v1/models")).json()["data"]
    assert {entry["id"] for entry in listed} == {"c", "cc"}


async def test_routes_come_and_go_with_the_workers_that_serve_them(fleet: ServedFleet) -> None:
    paths = ("/v1/classify", "/v1/pooling", "/v1/rerank", CHAT, COMPLETIONS)
    assert [(await post(fleet, path, model="x")).status for path in paths] == [404] * 5
    await fleet.scripted_worker([[CLASSIFIED]], "c", model_input="Text", model_type="Classify")
    gone = await post(fleet, "/v1/pooling", model="c", input="x")
    assert "No model that serves /v1/pooling" in gone.json()["message"]
    assert (await post(fleet, "/v1/classify", model="c", input="x")).status == 200
    assert (await post(fleet, "/v1/classify", model="c", input=5)).status == 400


async def test_media_routes_say_501_until_a_worker_serves_them(fleet: ServedFleet) -> None:
    for path in ("/v1/images/generations", "/v1/images/edits", "/v1/videos", "/v1/audio/speech", "/v1/videos/stream"):
        reply = await post(fleet, path, model="i", prompt="cat")
        assert (reply.status, reply.json()["error"]["code"]) == (501, "not_implemented"), path
    realtime = await call(fleet.app, "/v1/realtime", method="GET")
    assert realtime.status == 501
    requests = await fleet.scripted_worker(
        [[{"created": 1, "data": [{"b64_json": "AAAA"}]}]], "i", model_input="Text", model_type="Images"
    )
    reply = await post(fleet, "/v1/images/generations", model="i", prompt="cat", size="1x1")
    assert reply.json()["data"] == [{"b64_json": "AAAA", "revised_prompt": None}]
    assert (requests[0]["prompt"], requests[0]["size"]) == ("cat", "1x1")
    assert (await post(fleet, "/v1/videos", model="i", prompt="cat")).status == 501


async def test_worker_that_cannot_be_served_is_told_once_and_left_out(
    fleet: ServedFleet, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        await fleet.scripted_worker([], "c", wait=False, model_type="Classify")
        await fleet.scripted_worker([], "t", wait=False, model_input="Tensor")
        await wait_for(lambda: len(fleet.core.registry.state.models) == 2)
        await wait_for(lambda: sum("is not used" in record.message for record in caplog.records) == 2)
        await fleet.mock_worker()
    told = [record.message for record in caplog.records if "is not used" in record.message]
    assert len(told) == 2
    assert any("model c is not used: workers of classify get text" in text for text in told)
    assert any("model t is not used: model_input Tensor is not served" in text for text in told)
    assert set(fleet.models.statuses()) == {"m"}


async def test_busy_thresholds_refuse_whole_streams_and_requests_until_they_are_raised(fleet: ServedFleet) -> None:
    await fleet.mock_worker()
    listed = (await fleet.get("/busy_threshold")).json()["thresholds"]
    assert [entry["model"] for entry in listed] == ["m"]
    assert (await fleet.ask(CHAT, max_tokens=2)).status == 200
    await wait_for(lambda: bool(fleet.views.worker_load.state.ranks))
    # Nothing is less than no blocks at all, so only prompt tokens can be too many: hold some of them.
    (_, engine), *_ = fleet.models.routers()
    held = engine.router.route(RoutingRequest("held", list(range(50))))
    assert (await post(fleet, "/busy_threshold", model="m", active_prefill_tokens_threshold=10)).status == 200
    replies = [
        await fleet.ask(CHAT, max_tokens=2),
        await fleet.ask(CHAT, max_tokens=2, stream=True),
        await post(fleet, "/v1/responses", model="m", input="x"),
        await post(fleet, "/v1/responses", model="m", input="x", stream=True),
    ]
    assert [(reply.status, reply.json()["message"]) for reply in replies] == [
        (529, "Service temporarily overloaded")
    ] * 4
    ready = (await fleet.get("/v1/models/m/ready")).json()
    assert ready["ready"]
    raised = await post(fleet, "/busy_threshold", model="m", active_prefill_tokens_threshold=1000)
    assert raised.json() == {
        "model": "m",
        "active_decode_blocks_threshold": None,
        "active_prefill_tokens_threshold": 1000,
        "active_prefill_tokens_threshold_frac": None,
    }
    assert (await fleet.ask(CHAT, max_tokens=2, stream=True)).status == 200
    engine.router.release(held.key.request_id)


async def test_thresholds_begin_as_configured_and_outlive_a_change_of_the_models_card() -> None:
    config = FrontendConfig(router_mode="kv", active_decode_blocks_threshold=0.5, active_prefill_tokens_threshold=10)
    async with served_fleet(config=config) as fleet:
        first = await fleet.mock_worker()
        await post(fleet, "/busy_threshold", model="m", active_prefill_tokens_threshold=1000)
        # A worker of another card takes the name over when the first one is gone.
        await fleet.mock_worker(wait=False, block_size=32)
        first.set()
        await wait_for(lambda: fleet.models.statuses()["m"].block_size == 32 and fleet.models.statuses()["m"].ready)
        entry = (await fleet.get("/busy_threshold")).json()["thresholds"][0]
        assert (entry["active_decode_blocks_threshold"], entry["active_prefill_tokens_threshold"]) == (0.5, 1000)
        (_, engine), *_ = fleet.models.routers()
        held = engine.router.route(RoutingRequest("held", list(range(1500))))
        assert (await fleet.ask(CHAT, max_tokens=2)).status == 529
        engine.router.release(held.key.request_id)
        assert (await fleet.ask(CHAT, max_tokens=2)).status == 200

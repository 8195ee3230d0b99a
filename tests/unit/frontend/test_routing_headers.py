"""Headers that say where a request should go; more of them are among the recorded answers."""

from __future__ import annotations

import json
from concurrent.futures import Executor

import pytest

from dynamo_es.config.tree import FrontendConfig
from dynamo_es.frontend.requests import AgentHints, NvExt
from dynamo_es.frontend.routing_headers import with_headers
from tests.unit.frontend.asgi_client import call
from tests.unit.frontend.fakes import ScriptedEngine, application, frame, says, served


def test_headers_go_before_the_body_and_the_first_name_counts() -> None:
    body = NvExt(backend_instance_id=1, dp_rank=1, cache_salt="body", agent_hints=AgentHints(priority=1, osl=9))
    made = with_headers(
        body,
        {
            b"x-worker-instance-id": b"7",
            b"x-dynamo-worker-instance-id": b"5",
            b"x-prefill-instance-id": b" 6 ",
            b"x-data-parallel-rank": b"3",
            b"x-dynamo-prefill-dp-rank": b"2",
            b"x-dynamo-request-priority": b"-4",
            b"x-tenant-id": b"tenant",
        },
    )
    assert made == NvExt(
        backend_instance_id=5,
        decode_worker_id=5,
        prefill_worker_id=6,
        dp_rank=3,
        prefill_dp_rank=2,
        cache_salt="tenant",
        agent_hints=AgentHints(priority=-4, osl=9),
    )
    assert body.backend_instance_id == 1


@pytest.mark.parametrize(
    "text", [b"", b"x", b"1.5", b"-1", b"4294967295", b"99999999999999999999999", b"--1", "٣".encode()]
)
def test_values_that_say_nothing_are_passed_over(text: bytes) -> None:
    assert with_headers(None, {b"x-dp-rank": text}) is None
    known = NvExt(dp_rank=2)
    assert with_headers(known, {b"x-dp-rank": text}) is known


def test_priorities_have_bounds() -> None:
    assert with_headers(None, {b"x-dynamo-request-priority": b"2147483648"}) is None
    assert with_headers(None, {b"x-dynamo-request-strict-priority": b"-1"}) is None


async def test_headers_reach_workers_of_every_kind_unless_nvext_is_switched_off(executor: Executor) -> None:
    headers = {"content-type": "application/json", "x-dp-rank": "3", "x-tenant-id": "t"}
    for path, kind, body in (
        ("/v1/completions", "Completions", {"prompt": "x"}),
        ("/v1/embeddings", "Embedding", {"input": "x"}),
    ):
        engine = ScriptedEngine(says({**frame("x", "stop"), "embeddings": [[1.0]]}))
        app = application(served(engine, model_type=kind), executor=executor)
        await call(app, path, json.dumps({"model": "m", **body}).encode(), headers=headers)
        assert engine.requests[0]["routing"]["dp_rank"] == 3
    engine = ScriptedEngine(says(frame("x", "stop")))
    config = FrontendConfig(http_host="127.0.0.1", http_port=0, disable_nvext=True)
    app = application(served(engine), executor=executor, config=config)
    await call(app, "/v1/completions", b'{"model":"m","prompt":"x"}', headers=headers)
    assert engine.requests[0]["routing"] == {"cache_salt": "t"}

"""Requests that wait, are refused, take too long or fail in the middle, over workers on the real request plane."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json

import pytest
from fastapi.routing import APIRoute

from dynamo_es.config.tree import FrontendConfig
from dynamo_es.errors import StreamIncomplete
from dynamo_es.router.active_sequences import NO_LOAD
from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.router.policy_config import CacheBucket, PolicyClass, PolicyConfig, PolicyProfile
from dynamo_es.router.routing_request import RoutingRequest
from dynamo_es.runtime.request_server import Batch
from tests.integration.test_disaggregated_serving import typed_worker
from tests.support.runtimes import PATIENT, wait_for
from tests.support.served_fleet import CHAT, COMPLETIONS, served_fleet
from tests.unit.frontend.asgi_client import call

KV = FrontendConfig(router_mode="kv")
patient_fleet = functools.partial(served_fleet, runtime=PATIENT)


def queueing(limit=None):
    """A worker gets one prompt at a time; ``limit`` others wait for it."""
    only = PolicyClass("one-by-one", "f", "all", 1, prefill_busy_threshold=0, request_queue_limit_per_worker=limit)
    return KvRouterSettings(policy=PolicyConfig(PolicyProfile("f", (CacheBucket(0, "all"),), (only,))))


class Gate:
    """A worker's handler that answers when it is let; notes what it was asked and whether it was told to stop."""

    def __init__(self):
        self.order, self.contexts, self.open = [], [], asyncio.Event()

    async def __call__(self, request, context):
        self.order.append(bytes(request["token_ids"]).decode())
        self.contexts.append(context)
        opened = asyncio.ensure_future(self.open.wait())
        stopped = asyncio.ensure_future(context.async_killed_or_stopped())
        await asyncio.wait((opened, stopped), return_when=asyncio.FIRST_COMPLETED)
        for waiter in (opened, stopped):
            waiter.cancel()
        if not context.is_stopped():
            yield Batch([{"token_ids": [65], "finish_reason": "stop"}])


async def serve_gate(fleet, **options):
    gate = Gate()

    async def answer(request, context):
        async for batch in gate(request, context):
            yield batch

    runtime = await fleet.worker(answer, **options)
    return gate, runtime


def check_refusal(reply, limit, *, status=529):
    assert (reply.status, reply.headers["retry-after"]) == (status, "1")
    body = reply.json()
    assert (body["message"], body["code"]) == ("Service temporarily overloaded", status)
    assert body["error"]["code"] == limit


async def page(fleet):
    return (await fleet.get("/metrics")).text


def router_of(fleet):
    return fleet.models.find("m").engine.router


def check_freed(fleet):
    router = router_of(fleet)
    assert router.open_requests == 0
    assert all(router._sequences.load(rank) == NO_LOAD for rank in router._candidates())


async def test_PROTO_15_busy_workers_are_told_apart_from_other_limits():
    async with patient_fleet(config=dataclasses.replace(KV, active_prefill_tokens_threshold=10)) as fleet:
        await fleet.mock_worker()
        await wait_for(lambda: bool(fleet.views.worker_load.state.ranks))
        held = router_of(fleet).route(RoutingRequest("held", list(range(50))))
        for options in ({}, {"stream": True}):
            check_refusal(await fleet.ask(CHAT, max_tokens=2, **options), "workers_busy")
        router_of(fleet).release(held.key.request_id)
        text = await page(fleet)
        assert 'failures_total{class="CapacityExhausted",reason="capacity.pool_exhausted"} 2.0' in text
        assert 'model_rejection_total{endpoint="chat_completions",model="m"} 2.0' in text


async def test_PROTO_15_a_workers_own_limit_has_the_configured_status():
    async with patient_fleet(config=dataclasses.replace(KV, overload_status_code=429)) as fleet:
        gate, _ = await serve_gate(fleet, settings=dataclasses.replace(PATIENT, max_streams=1))
        first = asyncio.create_task(fleet.ask(COMPLETIONS, max_tokens=2))
        await wait_for(lambda: gate.order)
        check_refusal(await fleet.ask(COMPLETIONS, max_tokens=2), "worker_full", status=429)
        streamed = await fleet.ask(COMPLETIONS, max_tokens=2, stream=True)
        (failure,) = [json.loads(line[6:]) for line in streamed.text.split("\n\n") if line.startswith("data: {")]
        assert (failure["error"]["code"], failure["error"]["limit"]) == (529, "worker_full")
        gate.open.set()
        assert (await first).status == 200
        assert 'failures_total{class="CapacityExhausted",reason="capacity.worker_full"} 2.0' in await page(fleet)
        check_freed(fleet)


async def test_PROTO_15_a_full_queue_is_told_and_who_left_it_makes_room():
    async with patient_fleet(config=KV, settings=queueing(1)) as fleet:
        gate, _ = await serve_gate(fleet)
        asked = [asyncio.create_task(fleet.ask(COMPLETIONS, prompt="a", max_tokens=1))]
        await wait_for(lambda: gate.order)
        asked.append(asyncio.create_task(fleet.ask(COMPLETIONS, prompt="gone", max_tokens=1)))
        queue = router_of(fleet).admission.queue
        await wait_for(lambda: len(queue))
        check_refusal(await fleet.ask(COMPLETIONS, max_tokens=1), "queue_full")
        text = await page(fleet)
        assert 'failures_total{class="CapacityExhausted",reason="capacity.queue_full"} 1.0' in text
        # A client that leaves while it waits: nothing was booked, nobody was asked.
        leaving = next(one for one in fleet.app.service.running if one._context.id() not in router_of(fleet)._open)
        leaving.interrupt("disconnect")
        await asked[1]
        assert not len(queue)
        asked[1] = asyncio.create_task(fleet.ask(COMPLETIONS, prompt="b", max_tokens=1))
        await wait_for(lambda: len(queue))
        gate.open.set()
        assert [reply.status for reply in await asyncio.gather(*asked)] == [200, 200]
        assert gate.order == ["a", "b"]
        assert [end.outcome for end in await fleet.finished(2)] == ["ok", "ok"]
        check_freed(fleet)


async def test_who_is_more_urgent_leaves_the_queue_first():
    async with patient_fleet(config=KV, settings=queueing()) as fleet:
        gate, _ = await serve_gate(fleet)
        queue, asked = router_of(fleet).admission.queue, []
        for place, (prompt, headers) in enumerate(
            (
                ("a", {}),
                ("last", {}),
                ("third", {"x-dynamo-request-priority": "5"}),
                ("second", {"x-dynamo-request-strict-priority": "1"}),
                ("first", {"x-dynamo-request-strict-priority": "2"}),
            )
        ):
            body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 1}).encode()
            told = {"content-type": "application/json", **headers}
            asked.append(asyncio.create_task(call(fleet.app, COMPLETIONS, body, headers=told)))
            await wait_for(lambda: len(gate.order) + len(queue) > place, timeout_s=60)  # noqa: B023 - over by then
        gate.open.set()
        await asyncio.gather(*asked)
        assert gate.order == ["a", "first", "second", "third", "last"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waits", ["at the worker", "in the queue"])
async def test_a_request_that_takes_too_long_ends_with_the_deadline(stream, waits):
    config = dataclasses.replace(KV, request_timeout_s=0.3 if waits == "in the queue" else 1.0)
    async with patient_fleet(config=config, settings=queueing()) as fleet:
        gate, _ = await serve_gate(fleet)
        held = router_of(fleet).route(RoutingRequest("held", list(range(50)))) if waits == "in the queue" else None
        reply = await fleet.ask(COMPLETIONS, max_tokens=1, stream=stream)
        if stream:
            failure, done, _ = reply.text.split("\n\n")
            assert json.loads(failure[6:])["error"] == {
                "message": "Request deadline exceeded", "type": "timeout_error", "code": 504,
            }  # fmt: skip
            assert (reply.status, done) == (200, "data: [DONE]")
        else:
            assert (reply.status, reply.json()["message"]) == (504, "Request deadline exceeded")
        if held is None:
            await wait_for(lambda: gate.contexts and gate.contexts[0].is_stopped())
            (end,) = await fleet.finished()
            assert (end.outcome, end.detail) == ("error", "RequestDeadline")
        else:
            assert not gate.order
            router_of(fleet).release("held")
        check_freed(fleet)
        assert 'failures_total{class="Timeout",reason="backend.timeout"} 1.0' in await page(fleet)


async def test_a_worker_that_falls_silent_has_failed_the_request_and_another_one_goes_on():
    config = dataclasses.replace(KV, migration_limit=1)
    runtime = dataclasses.replace(PATIENT, stream_timeout_s=0.3, first_item_timeout_s=30.0, inhibited_s=60.0)
    async with served_fleet(config=config, runtime=runtime) as fleet:
        asked, stopped = [], asyncio.Event()

        async def answer(request, context):
            asked.append(request["token_ids"])
            yield Batch([{"token_ids": [65], "finish_reason": None if len(asked) == 1 else "stop"}])
            if len(asked) == 1:
                try:
                    await asyncio.Event().wait()
                finally:
                    stopped.set()

        await fleet.worker(answer, wait=False)
        await fleet.worker(answer)
        await wait_for(lambda: len(router_of(fleet)._candidates()) == 2)
        assert (await fleet.ask(COMPLETIONS, prompt="x", max_tokens=9)).json()["choices"][0]["text"] == "AA"
        assert asked == [[120], [120, 65]]
        await wait_for(stopped.is_set)
        assert [end.detail for end in await fleet.finished(2)] == ["StreamSilent", ""]
        # It is left out for a while, and there is nobody else to go on at when the next one falls silent.
        asked.clear()
        reply = await fleet.ask(COMPLETIONS, prompt="x", max_tokens=9)
        assert (reply.status, reply.json()["message"]) == (504, "Request deadline exceeded")
        check_freed(fleet)


async def test_a_client_that_leaves_during_the_prefill_frees_both_workers():
    async with patient_fleet(config=KV) as fleet:
        gate = Gate()

        async def prefill(request, context):
            async for batch in gate(request, context):
                yield batch

        async def decode(request, context):
            yield Batch([{"token_ids": [65], "finish_reason": "stop"}])

        await typed_worker(fleet, "prefill", prefill)
        await typed_worker(fleet, "decode", decode)
        await wait_for(lambda: (known := fleet.models.statuses().get("m")) is not None and known.ready)
        asking = asyncio.create_task(fleet.ask(COMPLETIONS, max_tokens=2, stream=True))
        await wait_for(lambda: gate.contexts)
        (exchange,) = fleet.app.service.running
        exchange.interrupt("disconnect")
        await asking
        await wait_for(lambda: gate.contexts[0].is_stopped())
        (end,) = await fleet.finished()
        assert end.outcome == "cancelled"
        check_freed(fleet)


async def test_PROTO_23_a_booking_lasts_while_its_worker_is_at_work_and_ends_once():
    async with patient_fleet(config=KV) as fleet:
        await fleet.scripted_worker([[{"token_ids": [token]}] for token in b"ab"] + [[{"token_ids": [99]}]])
        booked = []

        async def watched(scope, receive, send):
            async def noting(message):
                if b'"text"' in message.get("body", b""):
                    booked.append(router_of(fleet).open_requests)
                await send(message)

            await fleet.app(scope, receive, noting)

        body = json.dumps({"model": "m", "prompt": "x", "stream": True}).encode()
        assert (await call(watched, COMPLETIONS, body)).text.endswith("data: [DONE]\n\n")
        assert booked
        assert set(booked) == {1}
        assert len(await fleet.finished(1)) == 1
        check_freed(fleet)
        # Nothing that streams goes through FastAPI, and nothing of FastAPI's holds a resource for a request.
        routes = [route for route in fleet.app.admin.routes if isinstance(route, APIRoute)]
        assert routes
        assert not {CHAT, COMPLETIONS} & {route.path for route in routes}
        assert not any(route.dependant.dependencies for route in routes)


async def test_models_that_take_text_are_served_whatever_the_router_mode_and_begin_anew_but_do_not_go_on():
    async with patient_fleet(config=dataclasses.replace(KV, migration_limit=2)) as fleet:
        requests = []

        async def answer(request, context):
            requests.append(request)
            said = len(requests)
            if said == 1:
                raise StreamIncomplete("nothing came of it")
            choice = {"index": 0, "delta": {"role": "assistant", "content": "hello"}, "finish_reason": None}
            chunk = {"id": "x", "created": 1, "model": "m", "object": "chat.completion.chunk", "choices": [choice]}
            yield Batch([chunk])
            if said == 3:
                raise StreamIncomplete("half of it came")
            yield Batch([chunk | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}])

        card = {"model_input": "Text", "source_path": "/nowhere"}
        await fleet.worker(answer, wait=False, **card)
        await fleet.worker(answer, **card)
        await wait_for(lambda: len(router_of(fleet)._candidates()) == 2)
        reply = (await fleet.ask(CHAT)).json()
        assert (reply["id"], reply["choices"][0]["message"]["content"]) == ("x", "hello")
        assert requests[1]["messages"] == [{"role": "user", "content": "Hi"}]
        assert requests[1]["stream"] is True
        assert "routing" not in requests[1]
        assert (await fleet.ask(CHAT)).status == 503
        assert len(requests) == 3
        gone = await fleet.ask(CHAT, nvext={"backend_instance_id": 42})
        assert (gone.status, gone.json()["message"]) == (400, "Invalid request")
        assert [end.outcome for end in await fleet.finished(3)] == ["migrated", "ok", "error"]
        check_freed(fleet)


@pytest.mark.parametrize("status", [429, 500])
async def test_PROTO_14_an_error_in_the_stream_of_a_worker_is_one_of_the_answer(status):
    async with patient_fleet(config=KV) as fleet:
        error = {"error": {"code": status, "message": "SECRET"}}
        await fleet.scripted_worker([[error]], "only")
        await fleet.scripted_worker([[{"token_ids": [token]}] for token in b"abc"] + [[error]], "m")
        reply = await fleet.ask(COMPLETIONS, model="only")
        assert (reply.status, reply.json()["code"]) == (status, status)
        reply = await fleet.ask(COMPLETIONS)
        assert (reply.status, reply.json()["code"]) == (status, status)
        streamed = await fleet.ask(COMPLETIONS, stream=True)
        *parts, failure = [json.loads(line[6:]) for line in streamed.text.split("\n\n") if line.startswith("data: {")]
        assert "".join(part["choices"][0]["text"] for part in parts) == "abc"
        assert failure["error"]["code"] == status
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert "SECRET" not in reply.text + streamed.text
        assert {end.outcome for end in await fleet.finished(3)} == {"error"}

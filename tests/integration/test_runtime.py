"""Endpoints, clients, streams and their cancellation, between runtimes on one log."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from pathlib import Path

import pytest

from dynamo_es.errors import Cancelled, DynamoException, InvalidArgument
from dynamo_es.http_error import HttpError
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.endpoint import parse_endpoint_path
from dynamo_es.runtime.runtime import DistributedRuntime
from tests.support.runtimes import FAST, collect, count_handler, make_runtime, serving, wait_for

GOLDEN = Path(__file__).parent.parent / "data" / "golden" / "services"
CALLS = {
    case["case"]: case["result"] for case in json.loads((GOLDEN / "runtime_client_calls.json").read_text())["cases"]
}
PATHS = json.loads((GOLDEN / "runtime_endpoint_paths.json").read_text())["cases"]


@pytest.mark.parametrize("case", PATHS, ids=lambda case: case["case"][:40])
def test_golden_endpoint_paths(case):
    # The golden file abbreviates a name of 300 letters.
    path = "x" * 300 + ".b.c" if case["case"].endswith("…300") else case["case"]
    if case["result"] == "ok":
        assert len(parse_endpoint_path(path)) == 3
    else:
        with pytest.raises(ValueError) as raised:
            parse_endpoint_path(path)
        assert str(raised.value) == case["result"]["msg"]


async def raising_handler(request, context):
    errors = {
        "raise": ValueError("boom"),
        "http": HttpError(418, "teapot"),
        "inv": InvalidArgument("bad arg"),
        "dyn": DynamoException("dyn"),
        "canc": Cancelled("c"),
        "mid": ValueError("late"),
    }
    if request == "mid":
        yield 1
    raise errors[request]


async def odd_handler(request, context):
    if request == "none":
        yield None
    elif request == "set":
        yield {1, 2}
    elif request == "ctx":
        yield {"id": context.id(), "trace": context.trace_id, "md": dict(context.metadata)}


async def test_golden_client_calls(runtime):
    async with serving(runtime, "ns.comp.ep", count_handler):
        client = await runtime.endpoint("ns.comp.ep").client()
        assert await collect(client.generate("hi"), annotated=True) == CALLS["gen"]
        nested = {"a": [1, 2.5, None, True]}
        assert await collect(client.generate(nested, annotated=False)) == CALLS["gen_noann"]
        assert await collect(client.random("x", annotated=False)) == CALLS["rand"]
        number = client.instance_ids()[0]
        assert await collect(client.direct("x", number, annotated=False)) == CALLS["direct"]
        assert await collect(client.generate(2**64 - 1, annotated=False)) == CALLS["u64"]
        assert await collect(client.generate({1: 2}, annotated=False)) == CALLS["intkey"]
        assert await collect(client.generate(math.nan, annotated=False)) == CALLS["nan"]
        with pytest.raises(Exception) as raised:
            client.generate(2**70)
        assert str(raised.value) == CALLS["bigint"][2]
        with pytest.raises(TypeError, match="unsupported type object"):
            client.generate(object())
        stopped = Context()
        stopped.stop_generating()
        assert await collect(client.generate("x", annotated=False, context=stopped)) == CALLS["prestopped"]
        with pytest.raises(TimeoutError) as late:
            await client.wait_for_instance_by_runtime_data("k", "v", 0.05)
        assert str(late.value) == CALLS["wait_runtime_data_timeout"]["msg"]
        view = client.instances()[0]
        assert str(view) == f"ns/comp/ep/{number}"
        assert repr(view) == f"Instance(ns/comp/ep/{number})"
        assert view.transport.address.endswith(f"/{number:x}/ep")


async def test_golden_handler_errors(runtime):
    async with serving(runtime, "ns.comp.err", raising_handler):
        client = await runtime.endpoint("ns.comp.err").client()
        for request, case in (
            ("http", "http"), ("inv", "inv"), ("dyn", "dyn"), ("canc", "canc"), ("mid", "midraise")
        ):  # fmt: skip
            assert await collect(client.generate(request, annotated=False)) == CALLS[case]
        assert await collect(client.generate("raise"), annotated=True) == CALLS["raise_ann"]


async def test_golden_payload_oddities(runtime):
    async with serving(runtime, "ns.comp.odd", odd_handler):
        client = await runtime.endpoint("ns.comp.odd").client()
        assert await collect(client.generate("none", annotated=False)) == CALLS["none"]
        assert await collect(client.generate("none"), annotated=True) == CALLS["none_ann"]
        assert await collect(client.generate("set", annotated=False)) == CALLS["set"]
        context = Context("req-1", {"k": "v"})
        assert await collect(client.generate("ctx", annotated=False, context=context)) == CALLS["ctx"]


async def test_golden_constructor_errors():
    loop = asyncio.get_running_loop()
    for arguments, options, case in (
        (("bogus", "tcp"), {}, 0), (("mem", "bogus"), {}, 1), (("mem", "tcp"), {"event_plane": "bogus"}, 2)
    ):  # fmt: skip
        with pytest.raises(Exception) as raised:
            DistributedRuntime(loop, *arguments, **options)
        assert str(raised.value) == CALLS["drt_bad"][case]["msg"]


async def test_no_instance_and_unknown_instance(runtime):
    client = await runtime.endpoint("ns.comp.nobody").client()
    with pytest.raises(Exception, match=r"^Unavailable: No workers available for endpoint ns/comp/nobody$"):
        await client.generate("x")
    with pytest.raises(Exception, match=r"^CannotConnect: instance_id=7 not found for endpoint ns/comp/nobody$"):
        await client.direct("x", 7)


async def test_serving_twice_in_one_process_is_refused(runtime):
    async with serving(runtime, "ns.comp.ep", count_handler):
        with pytest.raises(DynamoException, match="Failed to create work handler metrics"):
            await runtime.endpoint("ns.comp.ep").serve_endpoint(count_handler)


async def test_a_handler_that_is_no_generator_fails_before_the_stream(runtime):
    async def broken(request, context):
        raise ValueError("no stream")

    async with serving(runtime, "ns.comp.broken", broken):
        client = await runtime.endpoint("ns.comp.broken").client()
        found = await collect(client.generate("x", annotated=False))
        assert found[0][1].startswith(
            "CannotConnect: Worker generate() failed before response stream: Generate Error: ValueError: no stream"
        ) or found[0][1].endswith("ValueError: no stream")


async def test_requests_go_to_all_instances_in_turn(log):
    servers = [make_runtime(log) for _ in range(3)]
    caller = make_runtime(log)

    def handler_of(runtime):
        async def handler(request):
            yield runtime.core.instance_id

        return handler

    try:
        tasks = [asyncio.create_task(server.endpoint("a.b.c").serve_endpoint(handler_of(server))) for server in servers]
        client = await caller.endpoint("a.b.c").client()
        await wait_for(lambda: len(client.instance_ids()) == 3)
        seen = []
        for _ in range(6):
            seen += [item async for item in await client.round_robin("x", annotated=False)]
        assert sorted(seen[:3]) == sorted(server.core.instance_id for server in servers)
        assert seen[:3] == seen[3:]
    finally:
        for runtime in (*servers, caller):
            await runtime.close()
        await asyncio.gather(*tasks)


async def test_cancellation_reaches_the_worker(runtime):
    stopped = asyncio.Event()

    async def endless(request, context):
        try:
            while not context.is_stopped():
                yield "token"
                await asyncio.sleep(0.001)
            stopped.set()
        finally:
            stopped.set()

    async with serving(runtime, "ns.comp.endless", endless):
        client = await runtime.endpoint("ns.comp.endless").client()
        context = Context()
        count = 0
        async for _ in await client.generate("x", annotated=False, context=context):
            count += 1
            if count == 3:
                context.stop_generating()
        assert count == 3
        async with asyncio.timeout(60):
            await stopped.wait()
        await wait_for(lambda: runtime.core.server.streams == 0)


async def test_leaving_the_iteration_cancels_too(runtime):
    ended = asyncio.Event()

    async def endless(request, context):
        try:
            while True:
                yield "token"
                await asyncio.sleep(0.001)
        finally:
            ended.set()

    async with serving(runtime, "ns.comp.endless", endless):
        client = await runtime.endpoint("ns.comp.endless").client()
        stream = await client.generate("x", annotated=False)
        async for _ in stream:
            break
        await stream.aclose()
        async with asyncio.timeout(60):
            await ended.wait()


async def test_a_producer_waits_for_its_consumer(log):
    runtime = make_runtime(log, runtime=dataclasses.replace(FAST, stream_window=8))
    produced = 0

    async def fast(request, context):
        nonlocal produced
        for number in range(1000):
            produced += 1
            yield number

    try:
        async with serving(runtime, "ns.comp.fast", fast):
            client = await runtime.endpoint("ns.comp.fast").client()
            stream = await client.generate("x", annotated=False)
            first = await anext(stream)
            await wait_for(lambda: produced >= 8)
            for _ in range(50):
                await asyncio.sleep(0)
            assert produced <= 32
            rest = [item async for item in stream]
            assert [first, *rest] == list(range(1000))
    finally:
        await runtime.close()


async def test_many_streams_share_one_connection(log):
    server, caller = make_runtime(log), make_runtime(log)

    async def echo(request):
        for number in range(20):
            await asyncio.sleep(0)
            yield [request, number]

    try:
        async with serving(server, "ns.comp.echo", echo):
            client = await caller.endpoint("ns.comp.echo").client()
            await client.wait_for_instances()

            async def call(number):
                return [item async for item in await client.generate(number, annotated=False)]

            results = await asyncio.gather(*(call(number) for number in range(200)))
            assert results == [[[number, step] for step in range(20)] for number in range(200)]
            assert len(server.core.server._peers) == 1
    finally:
        await caller.close()
        await server.close()


async def test_a_graceful_end_lets_streams_finish_and_takes_no_new_ones(log):
    server, caller = make_runtime(log), make_runtime(log)
    go = asyncio.Event()

    async def slow(request):
        yield 1
        await go.wait()
        yield 2

    task = asyncio.create_task(server.endpoint("ns.comp.slow").serve_endpoint(slow))
    client = await caller.endpoint("ns.comp.slow").client()
    await client.wait_for_instances()
    stream = await client.generate("x", annotated=False)
    assert await anext(stream) == 1
    server.shutdown()
    await wait_for(lambda: client.instance_ids() == [])
    assert not task.done()
    go.set()
    assert [item async for item in stream] == [2]
    assert await task == ()
    await server.close()
    await caller.close()

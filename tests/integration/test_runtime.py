from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.errors import Cancelled, DynamoException, InvalidArgument
from dynamo_es.http_error import HttpError
from dynamo_es.log.errors import LogUnavailable
from dynamo_es.log.memory import MemoryLog
from dynamo_es.log.open import open_log
from dynamo_es.log.state import LogCondition, LogState
from dynamo_es.router.hashing import hash_prompt
from dynamo_es.router.kv_router import KvRouter
from dynamo_es.runtime.appender import topic_configs
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.core import RuntimeCore, RuntimeSettings
from dynamo_es.runtime.endpoint import parse_endpoint_path
from dynamo_es.runtime.model_card import ModelFacts, make_card
from dynamo_es.runtime.runtime import DistributedRuntime
from schemas.columns import pack_u64
from schemas.kv_events import KV_EVENTS, BlocksStored, KvEvents, key_kv_events
from schemas.registry import REGISTRY, Instance, key_model
from tests.support.runtimes import FAST, make_runtime, serving, wait_for

GOLDEN = Path(__file__).parent.parent / "data" / "golden" / "services"
CALLS = {
    case["case"]: case["result"] for case in json.loads((GOLDEN / "runtime_client_calls.json").read_text())["cases"]
}
PATHS = json.loads((GOLDEN / "runtime_endpoint_paths.json").read_text())["cases"]


@pytest.fixture
async def log():
    log = MemoryLog("test", SystemClock(), random.Random(1))
    await log.start()
    yield log
    await log.close()


@pytest.fixture
async def runtime(log):
    runtime = make_runtime(log)
    yield runtime
    await runtime.close()


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


async def count_handler(request, context):
    for number in range(3):
        yield {"i": number, "req": request}


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


async def collect(awaitable, annotated=False):
    result = []
    try:
        async for item in await awaitable:
            if annotated:
                names = sorted(name for name in ("data", "event", "comments", "id", "is_error") if hasattr(item, name))
                result.append(
                    [
                        "ann",
                        names,
                        repr(item.data()),
                        repr(item.event()),
                        repr(item.comments()),
                        repr(item.id()),
                        item.is_error(),
                    ]
                )
            else:
                result.append(repr(item))
    except Exception as error:
        result.append([f"{type(error).__module__}.{type(error).__name__}", str(error)])
    return result


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
        async with asyncio.timeout(5):
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
        async with asyncio.timeout(5):
            await ended.wait()


async def test_a_producer_waits_for_its_consumer(log):
    runtime = make_runtime(log, runtime=FAST.__class__(**{**_fields(FAST), "stream_window": 8}))
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


async def test_a_silent_process_is_found_dead_and_its_registrations_go(log):
    server, caller = make_runtime(log), make_runtime(log)
    task = asyncio.create_task(server.endpoint("ns.comp.ep").serve_endpoint(count_handler))
    client = await caller.endpoint("ns.comp.ep").client()
    await client.wait_for_instances()
    lease = server.core.registration.lease_id
    server.core.registration._task.cancel()
    await wait_for(lambda: client.instance_ids() == [])
    assert lease in caller.core.registry.state.ended
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await server.close()
    await caller.close()


async def test_DISC_07_a_worker_that_comes_back_at_the_same_address_is_used_again(log):
    """It was taken for dead; whoever has its address then is somebody new, and connections are made anew."""
    runtime = FAST
    caller = make_runtime(log)
    client = await caller.endpoint("ns.comp.ep").client()
    for round_number in range(3):
        server = make_runtime(log, runtime=runtime)
        task = asyncio.create_task(server.endpoint("ns.comp.ep").serve_endpoint(count_handler))
        await wait_for(lambda server=server: client.instance_ids() == [server.core.instance_id])
        found = [item["i"] async for item in await client.generate(round_number, annotated=False)]
        assert found == [0, 1, 2], round_number
        lease = server.core.registration.lease_id
        runtime = dataclasses.replace(FAST, port=server.core.server.port)
        server.core.registration._task.cancel()
        server.core.server._pump.close()
        await wait_for(lambda lease=lease: lease in caller.core.registry.state.ended)
        await wait_for(lambda: client.instance_ids() == [])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.close()
    await caller.close()


async def test_DISC_13_a_worker_without_heartbeats_keeps_its_streams_and_comes_back(log):
    """Busy for longer than its lease: no new request goes there, what runs there is not cut off."""
    server, caller = make_runtime(log), make_runtime(log)
    go_on = asyncio.Event()

    async def slow(request):
        yield 1
        await go_on.wait()
        yield 2

    task = asyncio.create_task(server.endpoint("ns.comp.ep").serve_endpoint(slow))
    client = await caller.endpoint("ns.comp.ep").client()
    await client.wait_for_instances()
    stream = await client.generate("x", annotated=False)
    assert await anext(stream) == 1
    registration = server.core.registration
    registration._task.cancel()
    await wait_for(lambda: client.instance_ids() == [])
    with pytest.raises(Exception, match="Unavailable: No workers available"):
        await client.generate("x")
    go_on.set()
    assert [item async for item in stream] == [2]
    registration._task = asyncio.create_task(registration._keep())
    await wait_for(lambda: client.instance_ids() == [server.core.instance_id])
    assert [item async for item in await client.generate("x", annotated=False)] == [1, 2]
    assert registration.times_lost == 1
    server.shutdown()
    await task
    await server.close()
    await caller.close()


async def test_DISC_08_a_process_whose_lease_was_ended_registers_again(log):
    server, caller = make_runtime(log), make_runtime(log)
    task = asyncio.create_task(server.endpoint("ns.comp.ep").serve_endpoint(count_handler))
    client = await caller.endpoint("ns.comp.ep").client()
    await client.wait_for_instances()
    core = server.core
    old = core.registration.lease_id
    state = caller.core.registry.state
    await caller.core.monitor._end(state, state.leases[old])
    await wait_for(lambda: core.registration.lease_id != old)
    await wait_for(lambda: client.instance_ids() == [core.instance_id])
    assert core.registration.times_lost == 1
    server.shutdown()
    await task
    await server.close()
    await caller.close()


async def test_an_instance_that_died_is_quarantined_and_reported(log):
    server, caller = make_runtime(log), make_runtime(log)

    async def hang(request):
        yield 1
        await asyncio.Event().wait()

    task = asyncio.create_task(server.endpoint("ns.comp.hang").serve_endpoint(hang))
    client = await caller.endpoint("ns.comp.hang").client()
    await client.wait_for_instances()
    stream = await client.generate("x", annotated=False)
    assert await anext(stream) == 1
    server.core.server._pump.close()
    with pytest.raises(ValueError, match="BackendDisconnected"):
        await anext(stream)
    with pytest.raises(Exception, match="Unavailable: No workers available"):
        await client.generate("x")
    server.shutdown()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await server.close()
    await caller.close()


def _fields(config):
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


async def test_publishers_start_over_when_the_log_refuses_what_they_take_for_published(runtime):
    await runtime.core.start()
    renewed = asyncio.Event()
    runtime.core.renewals.append(renewed.set)
    topic = KV_EVENTS.qualified("dynamo")
    del runtime.core.log._log._topics[topic]
    assert runtime.core.appender.offer(KV_EVENTS, b"k", KvEvents(1, "m", 1, 0, 1, 0, 16, True, []))
    async with asyncio.timeout(10):
        await renewed.wait()


# ---- the log under a running process ----


@contextlib.asynccontextmanager
async def worker_and_caller(url):
    """A process that serves and one that calls it, each with a handle of its own to one log."""
    server, caller = make_runtime(url=url), make_runtime(url=url)
    try:
        async with serving(server, "ns.comp.ep", count_handler):
            client = await caller.endpoint("ns.comp.ep").client()
            await client.wait_for_instances()
            yield server, caller, client
            server.shutdown()
    finally:
        await server.close()
        await caller.close()


def conditions(runtimes):
    return {runtime.core.log_state.state for runtime in runtimes}


@pytest.mark.parametrize("maker", ["a process that starts", "nobody else"])
async def test_processes_start_over_on_a_log_that_was_made_anew(tmp_path, maker):
    url = f"embedded://{tmp_path}/log"
    async with worker_and_caller(url) as (server, caller, client):
        old_id = server.core.log.log_id
        renewed = asyncio.Event()
        server.core.renewals.append(renewed.set)
        assert conditions((server, caller)) == {LogCondition.OK}
        shutil.rmtree(tmp_path / "log")
        await wait_for(lambda: conditions((server, caller)) <= {LogCondition.AWAY, LogCondition.DEGRADED})
        assert "moved or deleted" in server.core.log_state.reason
        # An answer does not need the log: serving goes on with the last view.
        assert len(await collect(client.generate("x"))) == 3
        if maker == "nobody else":
            await open_and_close(url)
            third = None
        else:
            third = make_runtime(url=url)
            await third.core.start()
        await wait_for(lambda: conditions((server, caller)) == {LogCondition.OK})
        new_id = server.core.log.log_id
        assert new_id == caller.core.log.log_id != old_id
        async with asyncio.timeout(10):
            await renewed.wait()
        if third is not None:
            client = await third.endpoint("ns.comp.ep").client()
        await wait_for(lambda: client.instance_ids() == [server.core.instance_id])
        assert len(await collect(client.generate("x"))) == 3
        for runtime in (server, caller):
            registry = runtime.core.registry
            await wait_for(lambda registry=registry: len(registry.state.leases) == (2 if third is None else 3))
            assert registry.state.ended == {}
        if third is not None:
            await third.close()


async def open_and_close(url):
    """An empty log, as a tool leaves it behind."""
    log = open_log(url, SystemClock())
    await log.start()
    await log.close()


@pytest.mark.parametrize("missed", [False, True], ids=["at once", "after it was missed"])
async def test_a_process_registers_again_in_a_registry_that_was_made_anew(log, runtime, missed):
    async with serving(runtime, "ns.comp.ep", count_handler):
        core = runtime.core
        renewed = asyncio.Event()
        core.renewals.append(renewed.set)
        lease = core.registration.lease_id
        topic = REGISTRY.qualified("dynamo")
        del log._topics[topic]
        if missed:
            await wait_for(lambda: core.log_state.state is LogCondition.AWAY)
            assert "does not exist" in core.log_state.reason
        await log.create_topics(topic_configs("dynamo", None))
        async with asyncio.timeout(10):
            await renewed.wait()
        state = lambda: core.registry.state  # noqa: E731
        await wait_for(lambda: [item.instance_id for item in state().instances.values()] == [core.instance_id])
        assert core.registration.lease_id == lease
        assert list(state().leases) == [lease]
        await wait_for(lambda: core.log_state.ok)


async def test_what_could_not_be_registered_again_is_registered_later(log):
    server, caller = make_runtime(log), make_runtime(log)
    async with serving(server, "ns.comp.ep", count_handler):
        client = await caller.endpoint("ns.comp.ep").client()
        await client.wait_for_instances()
        core = server.core
        old = core.registration.lease_id
        appender, real = core.appender, core.appender.append
        failed = []

        async def no_instances(topic, key, value):
            if isinstance(value, Instance) and len(failed) < 3:
                failed.append(key)
                raise LogUnavailable("away")
            return await real(topic, key, value)

        appender.append = no_instances
        state = caller.core.registry.state
        await caller.core.monitor._end(state, state.leases[old])
        await wait_for(lambda: len(failed) == 3)
        await wait_for(lambda: client.instance_ids() == [core.instance_id])
        # One new lease, whatever number of tries it took.
        assert set(caller.core.registry.state.leases) == {core.registration.lease_id, caller.core.registration.lease_id}
        server.shutdown()
    await server.close()
    await caller.close()


async def test_a_log_that_takes_no_appends_is_told_and_serving_goes_on(log):
    server, caller = make_runtime(log), make_runtime(log)
    async with serving(server, "ns.comp.ep", count_handler):
        client = await caller.endpoint("ns.comp.ep").client()
        await client.wait_for_instances()
        assert server.core.log_state == LogState(LogCondition.OK)
        real = log.append_all

        async def read_only(topic, entries):
            raise LogUnavailable("attempt to write a readonly database")

        log.append_all = read_only
        await wait_for(lambda: conditions((server, caller)) == {LogCondition.DEGRADED})
        assert "readonly database" in server.core.log_state.reason
        assert len(await collect(client.generate("x"))) == 3
        log.append_all = real
        await wait_for(lambda: conditions((server, caller)) == {LogCondition.OK})
        server.shutdown()
    await server.close()
    await caller.close()


def test_before_its_start_a_process_has_no_log():
    loop = asyncio.new_event_loop()
    core = RuntimeCore(RuntimeSettings(), loop=loop, clock=SystemClock(), rng=random.Random(1), log=object())
    assert core.log_state == LogState(LogCondition.AWAY, "the log is not open yet")
    loop.close()


# ---- workers of one model that differ ----


async def test_OPS_01_a_worker_of_another_block_size_is_told_and_gets_no_cache_credit(log, caplog):
    """OPS-01: two workers of one model with blocks of 16 and 64 tokens, and a router of 16."""
    workers = {16: make_runtime(log), 64: make_runtime(log)}
    caller = make_runtime(log, role="router")
    tokens = list(range(256))
    facts = ModelFacts("/model", "m", 4096, {})
    where = ("ns", "comp", "ep")
    async with contextlib.AsyncExitStack() as stack:
        for size, runtime in workers.items():
            await stack.enter_async_context(serving(runtime, "ns.comp.ep", count_handler))
            core, worker_id = runtime.core, runtime.core.instance_id
            card = make_card(facts, where, worker_id, block_size=size, runtime_config={})
            await core.registration.register(key_model(*where, worker_id), card)
            hashes = list(map(pack_u64, hash_prompt(tokens, size)))
            # Also blocks that would match if their size were not looked at.
            forged = list(map(pack_u64, hash_prompt(tokens, 16)))
            events = [BlocksStored("device", None, column[1], column[0]) for column in (hashes, forged)]
            batch = KvEvents(1, "m", worker_id, 0, 1, 0, size, True, events)
            await core.appender.append(KV_EVENTS, key_kv_events("m", worker_id, 0), batch)
        router = KvRouter(caller.endpoint("ns.comp.ep"), 16)
        assert router.other_block_sizes == {}
        await router.start()
        right, wrong = workers[16].core.instance_id, workers[64].core.instance_id
        await wait_for(lambda: router.other_block_sizes == {wrong: 64})
        scores = await router.get_overlap_scores(tokens)
        assert {row["worker_id"]: row["device_blocks"] for row in scores["workers"]} == {right: 16, wrong: 0}
        assert (await router.best_worker(tokens))[0] == right
        # By load it takes part: prompts that nobody has cached go to both.
        chosen = [
            (await router.best_worker(list(range(1000 * number, 1000 * number + 256)), request_id=f"r{number}"))[0]
            for number in range(1, 21)
        ]
        assert {right: 10, wrong: 10} == Counter(chosen)
        await workers[64].core.registration.announce()
        await wait_for(lambda: len(caller.core.registry.state.leases) == 3)
        told = [record.getMessage() for record in caplog.records if "KV blocks of" in record.getMessage()]
        assert len(told) == 1
        assert f"worker {wrong} has KV blocks of 64 tokens, this router's are of 16" in told[0]
        for runtime in workers.values():
            runtime.shutdown()
    for runtime in (*workers.values(), caller):
        await runtime.close()

"""What becomes of a process that is silent, dies, comes back or loses its lease."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from tests.support.runtimes import FAST, count_handler, make_runtime, wait_for


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


async def test_DISC_10_three_processes_that_are_silent_at_once_go_while_a_fourth_registers(log):
    caller, newcomer = make_runtime(log), make_runtime(log)
    silent = [make_runtime(log) for _ in range(3)]
    tasks = [asyncio.create_task(each.endpoint("ns.comp.ep").serve_endpoint(count_handler)) for each in silent]
    client = await caller.endpoint("ns.comp.ep").client()
    await wait_for(lambda: len(client.instance_ids()) == 3)
    for each in silent:
        each.core.registration._task.cancel()
    tasks.append(asyncio.create_task(newcomer.endpoint("ns.comp.ep").serve_endpoint(count_handler)))
    await wait_for(lambda: client.instance_ids() == [newcomer.core.instance_id])
    ended = caller.core.registry.state.ended
    assert {each.core.registration.lease_id for each in silent} <= ended.keys()
    assert newcomer.core.registration.lease_id not in ended
    assert not caller.core.monitor._task.done()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for runtime in (*silent, newcomer, caller):
        await runtime.close()


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

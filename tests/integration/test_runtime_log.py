"""A process and a log that refuses, goes away, or is made anew."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from collections import Counter

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.log.errors import LogUnavailable
from dynamo_es.log.open import open_log
from dynamo_es.log.state import LogCondition, LogState
from dynamo_es.router.hashing import hash_prompt
from dynamo_es.router.kv_router import KvRouter
from dynamo_es.runtime.appender import topic_configs
from dynamo_es.runtime.core import RuntimeCore, RuntimeSettings
from dynamo_es.runtime.model_card import ModelFacts, make_card
from schemas.columns import pack_u64
from schemas.kv_events import KV_EVENTS, BlocksStored, KvEvents, key_kv_events
from schemas.registry import REGISTRY, Instance, key_model
from tests.support.runtimes import collect, count_handler, make_runtime, serving, wait_for


async def test_publishers_start_over_when_the_log_refuses_what_they_take_for_published(runtime):
    await runtime.core.start()
    renewed = asyncio.Event()
    runtime.core.renewals.append(renewed.set)
    topic = KV_EVENTS.qualified("dynamo")
    del runtime.core.log._log._topics[topic]
    assert runtime.core.appender.offer(KV_EVENTS, b"k", KvEvents(1, "m", 1, 0, 1, 0, 16, True, []))
    async with asyncio.timeout(60):
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
        async with asyncio.timeout(60):
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
        async with asyncio.timeout(60):
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

"""Indexers that share the KV index and routers that ask them, over the real request plane, in this process."""

from __future__ import annotations

import asyncio
import time

import pytest

from dynamo_es.config.tree import StateConfig
from dynamo_es.errors import DynamoException
from dynamo_es.log.base import TopicPartition
from dynamo_es.router.index_query import MAX_BLOCKS, make_answer
from dynamo_es.router.index_server import ViewServer
from dynamo_es.router.remote_index import MISSES_BEFORE_REST, REST_S, RemoteIndex
from dynamo_es.runtime.index_owners import INDEX_ENDPOINT, IndexOwner
from schemas.kv_snapshots import KV_SNAPSHOTS
from tests.support.index_fleet import ALL, BLOCK, TOPIC, IndexFleet, index_fleet
from tests.support.runtimes import wait_for

MODEL = "m"


async def compare(fleet: IndexFleet, remote: RemoteIndex, prompts: int = 30, *, moving: bool = False) -> int:
    """Ask for random prompts and compare with the view; how many had an overlap.

    ``moving``: events come in, so that answers and view are compared only where they are of the same positions.
    """
    hits = 0
    for number in range(prompts):
        hashes = fleet.held_prompt() if number % 2 else fleet.prompt()
        told = await remote.match(MODEL, hashes, BLOCK)
        if not moving or told.positions == fleet.view.kv_index.positions():
            assert told.overlaps == fleet.expected(hashes)
        assert {place.partition for place in told.positions} == ALL
        hits += bool(told.overlaps)
    return hits


@pytest.mark.parametrize("seed", range(4))
async def test_what_indexers_answer_equals_a_view_of_everything(seed):
    async with index_fleet(seed=seed) as fleet:
        await fleet.events(200)
        await fleet.indexer()
        await fleet.indexer()
        await fleet.wait_covered()
        remote = await fleet.remote()
        hits = 0
        for _ in range(5):
            await fleet.events(fleet.rng.randrange(1, 300))
            await fleet.settle(remote)
            hits += await compare(fleet, remote)
        assert hits > 20
        assert len(fleet.owners()) == 2
        assert remote.counters.lookups["partial"] == remote.counters.lookups["none"] == 0


async def test_a_router_that_serves_its_view_answers_alone_or_for_what_indexers_have_not():
    async with index_fleet() as fleet:
        await fleet.events(300)
        await fleet.view.wait_caught_up(10)
        other = await fleet.process("router")
        ViewServer(fleet.router.core, fleet.view.kv_index).start()
        remote = RemoteIndex(other.core, deadline_s=1.0)
        await remote.start()
        await wait_for(lambda: not remote.missing())
        assert await compare(fleet, remote) > 3
        await fleet.indexer("0-2,5")
        await wait_for(lambda: len(remote.owners()) == 2)
        assert await compare(fleet, remote) > 3
        assert remote.counters.questions["answered"] == 30 + 60


async def test_a_third_indexer_takes_its_part_and_hands_it_back_without_a_gap():
    async with index_fleet() as fleet:
        await fleet.events(300)
        for _ in range(2):
            await fleet.indexer()
        await fleet.wait_covered()
        remote = await fleet.remote()
        await fleet.settle(remote)
        stop = asyncio.Event()

        async def ask() -> int:
            asked = 0
            while not stop.is_set():
                await compare(fleet, remote, prompts=2, moving=True)
                asked += 1
                await asyncio.sleep(0.01)
            return asked

        asking = asyncio.create_task(ask())
        third = await fleet.indexer()

        def parts() -> list[int]:
            return sorted(len(owner.partitions) for owner in fleet.owners().values())

        await wait_for(lambda: parts() == [2, 3, 3] or asking.done())
        await fleet.events(50)
        await third.end()
        await wait_for(lambda: parts() == [4, 4] or asking.done())
        stop.set()
        assert await asking > 20
        assert third.instance_id not in fleet.owners()
        assert remote.counters.lookups["partial"] == remote.counters.lookups["none"] == 0


async def test_an_indexer_starts_from_its_own_store_and_a_new_one_from_snapshots(tmp_path):
    async with index_fleet() as fleet:
        state = StateConfig(state_dir=str(tmp_path / "a"), flush_interval_s=0.1, snapshot_interval_s=0.2)
        await fleet.events(300)
        first = await fleet.indexer(state=state)
        bounds = await fleet.log.bounds(KV_SNAPSHOTS.qualified("dynamo"))
        folded = {number for number, limits in (await fleet.log.bounds(TOPIC)).items() if limits.end}
        async with asyncio.timeout(60):
            while not all(bounds[number].end for number in folded):
                await asyncio.sleep(0.02)
                bounds = await fleet.log.bounds(KV_SNAPSHOTS.qualified("dynamo"))
        await first.end()
        # What the snapshots and the store cover cannot be read from the log any more.
        for number, limits in (await fleet.log.bounds(TOPIC)).items():
            await fleet.log.trim(TopicPartition(TOPIC, number), limits.end)
        await fleet.indexer(state=state)
        remote = await fleet.remote()
        await fleet.wait_covered()
        await fleet.settle(remote)
        assert await compare(fleet, remote) > 3
        await fleet.indexer()
        await wait_for(lambda: sorted(len(owner.partitions) for owner in fleet.owners().values()) == [4, 4], 20)
        assert await compare(fleet, remote) > 3


class Scripted:
    """A process that answers as a test wants it to."""

    def __init__(self, partitions=ALL):
        self.partitions, self.answer, self.asked = partitions, None, 0

    async def start(self, fleet: IndexFleet) -> Scripted:
        self.runtime = await fleet.process("indexer")
        core = self.runtime.core

        async def handle(request):
            self.asked += 1
            yield await self.answer(request)

        endpoint = self.runtime.endpoint(INDEX_ENDPOINT)
        endpoint.set_runtime_data(IndexOwner(core.instance_id, frozenset(self.partitions), "given").runtime_data())
        self.task = asyncio.create_task(endpoint.serve_endpoint(handle))
        await wait_for(lambda: core.instance_id in fleet.owners())
        return self


async def never(request):
    await asyncio.Event().wait()


async def nothing(request):
    return make_answer(dict.fromkeys(request[4], 1), [])


async def test_one_that_hangs_delays_few_decisions_and_comes_back_by_itself(caplog):
    async with index_fleet() as fleet:
        await fleet.events(300)
        await fleet.indexer("0-3")
        slow = await Scripted({4, 5, 6, 7}).start(fleet)
        slow.answer = nothing
        remote = await fleet.remote(deadline_s=0.2)
        assert len((await remote.match(MODEL, [1], BLOCK)).positions) == 8
        slow.answer = never
        for _ in range(MISSES_BEFORE_REST):
            began = time.monotonic()
            told = await remote.match(MODEL, fleet.held_prompt(), BLOCK)
            assert 0.19 < time.monotonic() - began < 1.0
            assert {place.partition for place in told.positions} == {0, 1, 2, 3}
        assert "missed the deadline" in caplog.text
        asked = slow.asked
        began = time.monotonic()
        for _ in range(5):
            told = await remote.match(MODEL, fleet.held_prompt(), BLOCK)
            assert {place.partition for place in told.positions} == {0, 1, 2, 3}
        assert time.monotonic() - began < REST_S
        assert slow.asked == asked
        assert remote.missing() == [4, 5, 6, 7]
        assert {owner.resting for owner in remote.owners()} == {True, False}
        assert remote.counters.questions["late"] == MISSES_BEFORE_REST
        assert remote.counters.lookups == {"full": 1, "partial": MISSES_BEFORE_REST + 5, "none": 0}
        slow.answer = nothing
        await wait_for(lambda: not remote.missing())
        assert len((await remote.match(MODEL, [1], BLOCK)).positions) == 8
        assert {owner.resting for owner in remote.owners()} == {False}


async def test_one_that_rests_is_replaced_by_another_that_answers_for_the_same():
    async with index_fleet() as fleet:
        stuck, well = await Scripted().start(fleet), await Scripted().start(fleet)
        well.answer = stuck.answer = nothing
        remote = await fleet.remote(deadline_s=0.1)
        await remote.match(MODEL, [1], BLOCK)
        if well.asked:
            stuck, well = well, stuck
        stuck.answer = never
        for _ in range(MISSES_BEFORE_REST + 1):
            assert not (await remote.match(MODEL, [1], BLOCK)).positions
        assert len((await remote.match(MODEL, [1], BLOCK)).positions) == 8
        assert well.asked == 1


async def fail(request):
    raise DynamoException("I know nothing")


async def lie(request):
    return make_answer({100: 1}, [])


async def babble(request):
    return {"worker": 1}


@pytest.mark.parametrize(("answer", "result"), [(fail, "refused"), (lie, "bad"), (babble, "bad")])
async def test_an_answer_that_is_none_costs_its_partitions_and_no_time(answer, result, caplog):
    async with index_fleet() as fleet:
        odd = await Scripted({0, 1}).start(fleet)
        odd.answer = answer
        remote = await fleet.remote(deadline_s=5.0)
        began = time.monotonic()
        for _ in range(5):
            told = await remote.match(MODEL, [1, 2], BLOCK)
            assert (told.overlaps, told.positions) == ({}, {})
        assert time.monotonic() - began < 2.0
        assert remote.counters.questions[result] == 1
        assert odd.asked == 1
        assert caplog.text.count("told once") == 1


async def test_without_indexers_nothing_is_waited_for():
    async with index_fleet() as fleet:
        remote = await fleet.remote(deadline_s=5.0)
        began = time.monotonic()
        assert await remote.match(MODEL, [1, 2], BLOCK) == ({}, {})
        assert await remote.match(MODEL, [], BLOCK) == ({}, {})
        assert time.monotonic() - began < 1.0
        assert remote.missing() == sorted(ALL)
        assert remote.counters.lookups == {"full": 0, "partial": 0, "none": 1}


async def test_a_process_that_is_not_asked_by_the_contract_says_so():
    async with index_fleet() as fleet:
        await fleet.indexer()
        client = await fleet.router.endpoint(INDEX_ENDPOINT).client()
        with pytest.raises(ValueError, match="index query"):
            async for _ in await client.generate({"token_ids": [1]}):
                pass
        with pytest.raises(ValueError, match="version 9"):
            async for _ in await client.generate([9, MODEL, 4, b"", []]):
                pass
        remote = await fleet.remote()
        assert len((await remote.match(MODEL, [7] * (MAX_BLOCKS + 10), BLOCK)).positions) == 8


async def test_a_view_that_is_being_made_anew_is_not_answered_from():
    async with index_fleet() as fleet:
        await fleet.events(200)
        await fleet.view.wait_caught_up(10)
        server = ViewServer(fleet.router.core, fleet.view.kv_index)
        await wait_for(lambda: server.shards().keys() == ALL)
        fleet.view.kv_index.counters.rebuilds += 1
        fleet.view.kv_index.status = type(fleet.view.kv_index.status).CATCHING_UP
        assert server.shards() == {}
        await fleet.events(1)
        await wait_for(lambda: server.shards().keys() == ALL)

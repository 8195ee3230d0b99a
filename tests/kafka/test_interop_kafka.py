"""Another Kafka client takes part by the published documents alone: a router uses what it writes, and it reads ours."""

from __future__ import annotations

import asyncio
import contextlib
import uuid

import pytest

pytest.importorskip("confluent_kafka", reason="the test extra has it")

from dynamo_es.llm import KvEventPublisher, KvRouter
from dynamo_es.runtime.model_card import BUILTIN_MODEL, make_card, read_model_facts
from schemas.registry import key_model
from tests.support.foreign_client import (
    ASYNCAPI,
    ForeignProducer,
    ForeignSchema,
    column,
    hashes_of,
    header_of,
    read_topic,
    topic_name,
)
from tests.support.runtimes import make_runtime, wait_for

pytestmark = pytest.mark.kafka
BLOCK = 16
WHERE = ("dynamo", "backend", "generate")
PROMPT = list(range(1000, 1000 + 10 * BLOCK + 5))


async def echo(request, context):
    yield {"token_ids": [1], "finish_reason": "stop"}


class Workers:
    """Serving runtimes that publish no events of their own, and a router, on a namespace of their own."""

    def __init__(self, servers, stack):
        self.servers = servers
        self.namespace = f"interop-{uuid.uuid4().hex[:8]}"
        self.serving = []
        self._stack = stack

    async def runtime(self, role="worker"):
        runtime = make_runtime(url=f"kafka://{self.servers}", namespace=self.namespace, role=role)
        self._stack.push_async_callback(runtime.close)
        await runtime.core.start()
        return runtime

    async def worker(self):
        runtime = await self.runtime()
        core = runtime.core
        card = make_card(
            read_model_facts(BUILTIN_MODEL), WHERE, core.instance_id, name="m", block_size=BLOCK, runtime_config={}
        )
        await core.registration.register(key_model(*WHERE, core.instance_id), card)
        self.serving.append(asyncio.create_task(runtime.endpoint(".".join(WHERE)).serve_endpoint(echo)))
        return runtime

    async def router(self, workers):
        runtime = await self.runtime("router")
        router = KvRouter(runtime.endpoint(".".join(WHERE)), BLOCK)
        await router.start()
        client = await runtime.endpoint(".".join(WHERE)).client()
        await wait_for(lambda: set(client.instance_ids()) == {worker.core.instance_id for worker in workers})
        return router


@pytest.fixture
async def fleet(kafka_bootstrap):
    async with contextlib.AsyncExitStack() as stack:
        fleet = Workers(kafka_bootstrap, stack)
        yield fleet
    await asyncio.gather(*fleet.serving)


def stored(schema, worker_id, *, seq, blocks, incarnation=77):
    tokens_hashes, sequence_hashes = hashes_of(PROMPT, BLOCK)
    chain = ("BlocksStored", {
        "tier": "device",
        "parent": None if blocks.start == 0 else sequence_hashes[blocks.start - 1],
        "sequence_hashes": column(sequence_hashes[blocks]),
        "tokens_hashes": column(tokens_hashes[blocks]),
    })  # fmt: skip
    return schema.pack(
        "KvEvents", model="m", worker_id=worker_id, dp_rank=0, incarnation=incarnation, seq=seq, block_size=BLOCK,
        reset=seq == 0, events=[chain],
    )  # fmt: skip


async def overlap_of(router):
    worker, _, overlap = await router.best_worker(PROMPT)
    return worker, overlap


async def until(condition, timeout_s=60.0):
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.02)


async def test_a_router_uses_kv_events_that_another_client_wrote_by_the_schema(fleet):
    workers = [await fleet.worker(), await fleet.worker()]
    router = await fleet.router(workers)
    schema = ForeignSchema("kv-events")
    topic, header = topic_name("kv-events", fleet.namespace), header_of("kv-events")
    assert (await overlap_of(router))[1] == 0
    target = workers[1].core.instance_id
    key = f"m/{target}:0".encode()
    producer = await asyncio.to_thread(ForeignProducer, fleet.servers)
    first = await asyncio.to_thread(
        producer.send, topic, key, stored(schema, target, seq=0, blocks=slice(0, 6)), header
    )

    async def uses(blocks):
        return await overlap_of(router) == (target, blocks)

    await until(lambda: uses(6))
    second = await asyncio.to_thread(
        producer.send, topic, key, stored(schema, target, seq=1, blocks=slice(6, 10)), header
    )
    await until(lambda: uses(10))
    # It went where ours go: the document's partitioner is the one that our writers use.
    assert first == second
    # The same key without a header is as good; a repetition changes nothing; a hole takes the trust away.
    await asyncio.to_thread(producer.send, topic, key, stored(schema, target, seq=1, blocks=slice(6, 10)))
    state = router._views.kv_index.state
    await wait_for(lambda: state.counters.duplicates == 1)
    assert await uses(10)
    await asyncio.to_thread(producer.send, topic, key, stored(schema, target, seq=5, blocks=slice(0, 1)), header)
    await wait_for(lambda: state.counters.gaps == 1)
    assert (await overlap_of(router))[1] == 0
    # What it did wrong it finds in dead-letters, by the schema as well.
    await asyncio.to_thread(producer.send, topic, key, b"\xc1 no MessagePack")
    letters = await asyncio.to_thread(
        read_topic, fleet.servers, topic_name("dead-letters", fleet.namespace), lambda found: found
    )
    letter = ForeignSchema("dead-letters").unpack(letters[0].value())
    assert (letter["topic"], letter["partition"], letter["reason"]) == (topic, first, "undecodable")
    assert letter["value"] == b"\xc1 no MessagePack"


async def test_EVT_14_a_transactions_marks_are_no_lag(fleet):
    """Offsets of transaction marks have no record: a view that waits for one would never be live."""
    worker = await fleet.worker()
    router = await fleet.router([worker])
    schema, target = ForeignSchema("kv-events"), worker.core.instance_id
    producer = await asyncio.to_thread(
        ForeignProducer, fleet.servers, **{"transactional.id": f"interop-{uuid.uuid4().hex}"}
    )
    producer.begin()
    await asyncio.to_thread(
        producer.send, topic_name("kv-events", fleet.namespace), f"m/{target}:0".encode(),
        stored(schema, target, seq=0, blocks=slice(0, 3)), header_of("kv-events"),
    )  # fmt: skip
    await asyncio.to_thread(producer.commit)

    async def used():
        return await overlap_of(router) == (target, 3)

    await until(used)
    index = router._views.kv_index

    async def caught_up():
        return await index.measure_lag() == 0

    await until(caught_up)
    assert sum(index.positions().values()) == 2  # the record, and the mark behind it
    await index.wait_caught_up(5)


async def test_another_client_reads_our_events_by_the_schema(fleet):
    worker = await fleet.worker()
    target = worker.core.instance_id
    publisher = KvEventPublisher(worker.endpoint(".".join(WHERE)), kv_block_size=BLOCK)
    tokens_hashes, sequence_hashes = hashes_of(PROMPT, BLOCK)
    publisher.publish_stored(PROMPT[: 4 * BLOCK], [BLOCK] * 4, [1, 2, 3, 4])
    publisher.publish_removed([4])
    topic, schema = topic_name("kv-events", fleet.namespace), ForeignSchema("kv-events")

    def enough(messages):
        return any(
            event["type"] == "removed" for message in messages for event in schema.unpack(message.value())["events"]
        )

    messages = await asyncio.to_thread(read_topic, fleet.servers, topic, enough)
    batches = [schema.unpack(message.value()) for message in messages]
    assert {message.key() for message in messages} == {f"m/{target}:0".encode()}
    assert {tuple(message.headers()) for message in messages} == {tuple(header_of("kv-events"))}
    assert len({message.partition() for message in messages}) == 1
    assert [batch["seq"] for batch in batches] == list(range(len(batches)))
    assert {(batch["type"], batch["model"], batch["worker_id"], batch["block_size"]) for batch in batches} == {
        ("kv-events", "m", target, BLOCK)
    }
    (chain,) = [event for batch in batches for event in batch["events"] if event["type"] == "stored"]
    assert chain["sequence_hashes"] == column(sequence_hashes[:4])
    assert chain["tokens_hashes"] == column(tokens_hashes[:4])
    (removed,) = [event for batch in batches for event in batch["events"] if event["type"] == "removed"]
    assert removed["sequence_hashes"] == column(sequence_hashes[3:4])
    # A decision is an event as well, with the candidates that it was made from.
    router = await fleet.router([worker])

    async def overlap():
        return (await overlap_of(router))[1] == 3

    await until(overlap)
    async for _ in await router.generate(PROMPT, model="m", stop_conditions={"max_tokens": 1}):
        pass
    requests = ForeignSchema("requests")
    found = await asyncio.to_thread(
        read_topic, fleet.servers, topic_name("requests", fleet.namespace),
        lambda messages: {"routed", "finished"} <= {requests.unpack(message.value())["type"] for message in messages},
    )  # fmt: skip
    routed = next(value for message in found if (value := requests.unpack(message.value()))["type"] == "routed")
    assert (routed["worker_id"], routed["overlap_blocks"]) == (target, 3)
    assert {message.key() for message in found} == {routed["request_id"].encode()}
    assert ASYNCAPI["channels"]["requests"]["bindings"]["kafka"]["partitions"] >= 1

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path

import msgspec
import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.config.tree import FrontendConfig
from dynamo_es.frontend.discovery import RegistryModels
from dynamo_es.frontend.errors import ModelNotFound, ModelNotReady
from dynamo_es.log.base import Entry, TopicPartition
from dynamo_es.log.memory import MemoryLog
from dynamo_es.router.config import KvRouterSettings
from dynamo_es.router.routing_request import RoutingRequest
from dynamo_es.router.source_reaper import SourceReaper
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.model_card import BUILTIN_MODEL, make_card, read_model_facts
from dynamo_es.runtime.request_server import Batch
from dynamo_es.runtime.views import RoutingViews
from schemas.codec import TopicCodec
from schemas.columns import pack_u64
from schemas.dead_letters import DEAD_LETTERS
from schemas.kv_events import KV_EVENTS, BlocksStored, KvEvents, key_kv_events
from schemas.registry import key_model
from schemas.requests import REQUESTS, Routed
from tests.support.open_things import open_things
from tests.support.runtimes import make_runtime, wait_for

SMOLLM = Path(__file__).parent.parent / "data" / "models" / "smollm2-135m-instruct"
ENDPOINT = "dynamo.backend.generate"
NOBODY = "no namespace has all required worker types live"


class Fleet:
    """Workers in this process, and the frontend's view of them."""

    def __init__(self, log):
        self.log = log
        self.runtimes = []
        self.tasks = []

    async def directory(self, mode="kv", **options):
        self.frontend = make_runtime(self.log, role="frontend")
        self.runtimes.append(self.frontend)
        core = self.frontend.core
        await core.start()
        self.views = RoutingViews(core)
        await self.views.start()
        models = RegistryModels(core, self.views, FrontendConfig(router_mode=mode, **options), KvRouterSettings())
        models.refresh()
        return models

    async def worker(self, source, name="m", aliases=(), block_size=16, path=ENDPOINT, **more):
        runtime = make_runtime(self.log)
        self.runtimes.append(runtime)
        core = runtime.core
        await core.start()

        async def answer(request, context):
            yield Batch([{"token_ids": [core.instance_id % 1000]}, {"token_ids": [], "finish_reason": "stop"}])

        self.tasks.append(asyncio.create_task(runtime.endpoint(path).serve_endpoint(answer)))
        facts = source if not isinstance(source, str) else read_model_facts(source)
        card = make_card(facts, path.split("."), core.instance_id, name=name, block_size=block_size, runtime_config={})
        card = msgspec.structs.replace(card, aliases=list(aliases), **more)
        await core.registration.register(key_model(*path.split("."), core.instance_id), card)
        return runtime

    async def close(self):
        for runtime in reversed(self.runtimes):
            await runtime.close()
        await asyncio.gather(*self.tasks)


@pytest.fixture
async def fleet():
    log = MemoryLog("test", SystemClock(), random.Random(1))
    await log.start()
    fleet = Fleet(log)
    yield fleet
    await fleet.close()
    await log.close()


async def values_of(log, spec, count):
    """The first ``count`` values of a topic, waiting for them."""
    codec, topic, values = TopicCodec(spec), spec.qualified("dynamo"), []
    reader = log.reader({TopicPartition(topic, number): 0 for number in range(spec.partitions)})
    async with asyncio.timeout(60):
        while len(values) < count:
            for records in (await reader.poll(timeout_s=1.0)).values():
                values += [codec.decode(record.value, record.headers) for record in records]
    await reader.close()
    return values


def workers_of(models, name="m"):
    return models.statuses()[name].namespaces["dynamo"]["worker_types"]["aggregated"]["workers"]


def is_ready(models, name="m"):
    try:
        return models.find(name)
    except (ModelNotFound, ModelNotReady):
        return None


async def test_models_come_and_go_with_their_workers(fleet):
    models = await fleet.directory()
    with pytest.raises(ModelNotFound):
        models.find("m")
    worker = await fleet.worker(BUILTIN_MODEL, aliases=["other-name"])
    await wait_for(lambda: is_ready(models))
    assert models.find("other-name") is models.find("m")
    assert sorted(name for name, _ in models.models()) == ["m", "other-name"]
    assert models.serves("chat")
    status = models.statuses()["m"]
    assert (status.ready, status.reason) == (True, None)
    await worker.close()
    await wait_for(lambda: not models.serves("chat"))
    with pytest.raises(ModelNotFound):
        models.find("m")


async def test_a_model_routes_to_its_workers(fleet):
    models = await fleet.directory()
    workers = [await fleet.worker(BUILTIN_MODEL) for _ in range(2)]
    await wait_for(
        lambda: (
            is_ready(models)
            and models.statuses()["m"].namespaces["dynamo"]["worker_types"]["aggregated"]["workers"] == 2
        )
    )
    engine = models.find("m").engine
    seen = set()
    for number in range(16):
        request = {"token_ids": [number * 50 + offset for offset in range(40)]}
        frames = [frame async for batch in engine.generate(request, Context()) for frame in batch]
        assert frames[-1]["finish_reason"] == "stop"
        seen.add(frames[0]["token_ids"][0])
    assert seen == {worker.core.instance_id % 1000 for worker in workers}


async def test_DISC_05_a_model_that_cannot_be_loaded_says_why_and_is_tried_again(fleet, tmp_path):
    models = await fleet.directory()
    shutil.copytree(SMOLLM, tmp_path / "model")
    facts = read_model_facts(str(tmp_path / "model"))
    (tmp_path / "model" / "tokenizer.json").rename(tmp_path / "aside")
    (tmp_path / "model" / "tokenizer_config.json").rename(tmp_path / "aside2")
    await fleet.worker(facts)
    await wait_for(lambda: "m" in models.statuses() and "not loaded" in (models.statuses()["m"].reason or ""))
    with pytest.raises(ModelNotReady, match=r"not loaded: .*model"):
        models.find("m")
    assert models.models() == []
    (tmp_path / "aside").rename(tmp_path / "model" / "tokenizer.json")
    (tmp_path / "aside2").rename(tmp_path / "model" / "tokenizer_config.json")
    await wait_for(lambda: is_ready(models))


async def test_DISC_06_only_a_worker_with_a_really_different_tokenizer_is_refused(fleet, tmp_path):
    models = await fleet.directory()
    for name in ("a", "b", "c"):
        shutil.copytree(SMOLLM, tmp_path / name)
    (tmp_path / "c" / "tokenizer.json").write_text((SMOLLM / "tokenizer.json").read_text() + " ")
    first = await fleet.worker(str(tmp_path / "a"))
    await wait_for(lambda: is_ready(models))
    second = await fleet.worker(str(tmp_path / "b"))
    third = await fleet.worker(str(tmp_path / "c"))
    await wait_for(lambda: models.statuses()["m"].refused)
    refused = models.statuses()["m"].refused
    assert list(refused) == [third.core.instance_id]
    refusal = refused[third.core.instance_id]
    assert refusal.reason == "its checksum of tokenizer.json differs from that of the model"
    assert "--model-name" in refusal.remedy
    kinds = models.statuses()["m"].namespaces["dynamo"]["worker_types"]
    assert kinds["aggregated"]["workers"] == 2
    engine = models.find("m").engine
    seen = set()
    for number in range(12):
        request = {"token_ids": [number * 50 + offset for offset in range(40)]}
        seen |= {frame["token_ids"][0] async for batch in engine.generate(request, Context()) for frame in batch[:1]}
    assert seen == {first.core.instance_id % 1000, second.core.instance_id % 1000}


async def answers(models, name="m", count=12):
    """Marks of the workers that answer ``count`` requests for a model."""
    engine = models.find(name).engine
    seen = set()
    for number in range(count):
        request = {"token_ids": [number * 50 + offset for offset in range(40)]}
        seen |= {frame["token_ids"][0] async for batch in engine.generate(request, Context()) for frame in batch[:1]}
    return seen


def mark(worker):
    return worker.core.instance_id % 1000


def other_files(tmp_path, name):
    """Model files whose tokenizer has another checksum."""
    shutil.copytree(SMOLLM, tmp_path / name)
    (tmp_path / name / "tokenizer.json").write_text((SMOLLM / "tokenizer.json").read_text() + " ")
    return str(tmp_path / name)


def errors_of(caplog, text):
    return [record for record in caplog.records if record.levelname == "ERROR" and text in record.getMessage()]


async def test_a_refused_worker_takes_the_name_over_when_no_worker_of_the_old_card_is_left(fleet, tmp_path, caplog):
    models = await fleet.directory()
    first, second = await fleet.worker(str(SMOLLM)), await fleet.worker(str(SMOLLM))
    await wait_for(lambda: is_ready(models) and workers_of(models) == 2)
    since = models.find("m").created
    third = await fleet.worker(other_files(tmp_path, "other"))
    await wait_for(lambda: models.statuses()["m"].refused)
    await first.close()
    await wait_for(lambda: workers_of(models) == 1)
    assert list(models.statuses()["m"].refused) == [third.core.instance_id]
    assert await answers(models, count=3) == {mark(second)}
    fourth = await fleet.worker(BUILTIN_MODEL, name="unrelated")
    await wait_for(lambda: "unrelated" in models.statuses())
    assert len(errors_of(caplog, f"worker {third.core.instance_id} is not used")) == 1
    await second.close()
    await wait_for(lambda: is_ready(models) and not models.statuses()["m"].refused)
    assert models.find("m").card.checksums == read_model_facts(str(tmp_path / "other")).checksums
    assert models.find("m").created >= since
    assert await answers(models, count=3) == {mark(third)}
    assert len(errors_of(caplog, "is not used")) == 1
    await fourth.close()


async def test_a_draining_worker_does_not_hold_the_name(fleet, tmp_path):
    models = await fleet.directory()
    old = await fleet.worker(str(SMOLLM))
    await wait_for(lambda: is_ready(models))
    new = await fleet.worker(other_files(tmp_path, "other"))
    await wait_for(lambda: models.statuses()["m"].refused)
    await old.endpoint(ENDPOINT)._register("draining")
    await wait_for(lambda: not models.statuses()["m"].refused)
    await wait_for(lambda: is_ready(models))
    assert await answers(models, count=3) == {mark(new)}


async def test_another_endpoint_cannot_take_a_name_that_is_served(fleet):
    models = await fleet.directory()
    worker = await fleet.worker(BUILTIN_MODEL)
    await wait_for(lambda: is_ready(models))
    elsewhere = await fleet.worker(BUILTIN_MODEL, path="dynamo.another.generate")
    await wait_for(lambda: models.statuses()["m"].refused)
    assert "dynamo.another.generate" in models.statuses()["m"].refused[elsewhere.core.instance_id].reason
    assert await answers(models, count=3) == {mark(worker)}
    await worker.close()
    await wait_for(lambda: is_ready(models) and not models.statuses()["m"].refused)
    assert await answers(models, count=3) == {mark(elsewhere)}


async def test_models_that_share_an_endpoint_keep_their_own_workers(fleet):
    models = await fleet.directory()
    workers = {name: await fleet.worker(BUILTIN_MODEL, name=name) for name in ("a", "b")}
    await wait_for(lambda: all(is_ready(models, name) for name in workers))
    for name, worker in workers.items():
        assert await answers(models, name, count=6) == {mark(worker)}
    routed = [event for event in await values_of(fleet.log, REQUESTS, 24) if isinstance(event, Routed)]
    assert {(event.model, event.worker_id) for event in routed} == {
        (name, worker.core.instance_id) for name, worker in workers.items()
    }


async def test_the_router_follows_when_no_worker_of_its_block_size_is_left(fleet):
    models = await fleet.directory()
    small = await fleet.worker(BUILTIN_MODEL, block_size=16)
    await wait_for(lambda: is_ready(models))
    large = await fleet.worker(BUILTIN_MODEL, block_size=64)
    await wait_for(lambda: workers_of(models) == 2)
    before = models.find("m")
    await small.close()
    await wait_for(lambda: is_ready(models) not in (None, before))
    assert models.find("m").card.kv_cache_block_size == 64
    assert await answers(models, count=2) == {mark(large)}


async def test_OPS_01_a_worker_of_another_block_size_gets_no_cache_credit_but_serves(fleet):
    models = await fleet.directory()
    small = await fleet.worker(BUILTIN_MODEL, block_size=16)
    await wait_for(lambda: is_ready(models))
    large = await fleet.worker(BUILTIN_MODEL, block_size=64)
    tokens = list(range(128))
    from dynamo_es.router.hashing import hash_prompt

    column = pack_u64(hash_prompt(tokens, 64)[1])
    batch = KvEvents(1, "m", large.core.instance_id, 0, 1, 0, 64, True, [BlocksStored("device", None, column, column)])
    await large.core.appender.append(KV_EVENTS, key_kv_events("m", large.core.instance_id, 0), batch)
    await wait_for(
        lambda: (
            sum(fleet.views.kv_index.state.models["m"].tier_blocks) == 2 if fleet.views.kv_index.state.models else False
        )
    )
    router = models.find("m").engine.router
    from dynamo_es.router.choosers import RoutingRequest

    rows = router.choose(RoutingRequest("r", tokens)).costs
    assert {row.candidate.rank.worker_id for row in rows} == {small.core.instance_id, large.core.instance_id}
    assert all(row.candidate.device == 0 for row in rows)


async def test_DISC_02_a_draining_worker_gets_no_new_requests(fleet):
    models = await fleet.directory()
    first, second = await fleet.worker(BUILTIN_MODEL), await fleet.worker(BUILTIN_MODEL)
    await wait_for(lambda: is_ready(models) and workers_of(models) == 2)
    endpoint = first.endpoint(ENDPOINT)
    await endpoint._register("draining")
    await wait_for(lambda: workers_of(models) == 1)
    engine = models.find("m").engine
    for number in range(10):
        request = {"token_ids": [number * 50 + offset for offset in range(40)]}
        async for batch in engine.generate(request, Context()):
            assert batch[0]["token_ids"] == [second.core.instance_id % 1000]


async def test_blocks_of_a_worker_that_is_gone_leave_the_index(fleet):
    await fleet.directory()
    SourceReaper(fleet.frontend.core, fleet.views.index_states).start()
    worker = await fleet.worker(BUILTIN_MODEL)
    column = pack_u64([1, 2, 3])
    number = worker.core.instance_id
    batch = KvEvents(1, "m", number, 0, 1, 0, 16, True, [BlocksStored("device", None, column, column)])
    await worker.core.appender.append(KV_EVENTS, key_kv_events("m", number, 0), batch)
    await wait_for(lambda: fleet.views.kv_index.state.sources)
    await worker.close()
    source = next(iter(fleet.views.kv_index.state.sources.values()))
    await wait_for(lambda: source.retired)
    assert fleet.views.kv_index.state.models["m"].tier_blocks == [0, 0, 0, 0]


async def test_SEC_05_what_is_not_an_event_becomes_a_dead_letter_and_is_never_run(fleet, tmp_path):
    await fleet.directory()
    log, marker = fleet.log, tmp_path / "touched"
    pickled = b"cposix\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    topic = KV_EVENTS.qualified("dynamo")
    position = await log.append(topic, Entry(pickled, pickled, (("schema", pickled),)))
    await fleet.views.kv_index.wait_applied(position, 5)
    await fleet.frontend.core.buffer.flush(5)
    letters = DEAD_LETTERS.qualified("dynamo")
    reader = log.reader({TopicPartition(letters, 0): 0})
    records = next(iter((await reader.poll(timeout_s=5)).values()))
    letter = TopicCodec(DEAD_LETTERS).decode(records[0].value, records[0].headers)
    assert (letter.topic, letter.offset, letter.value) == (topic, position.offset, pickled)
    assert not marker.exists()
    await reader.close()


async def test_a_decode_worker_is_not_ready_without_the_prefill_worker_that_it_needs(fleet):
    models = await fleet.directory()
    await fleet.worker(BUILTIN_MODEL, worker_type="decode", needs=[["prefill"]])
    await wait_for(lambda: "m" in models.statuses() and models.statuses()["m"].reason == NOBODY)
    assert models.statuses()["m"].namespaces["dynamo"] == {
        "ready": False,
        "reason": "missing worker types: prefill",
        "worker_types": {"decode": {"workers": 1, "needs": [["prefill"]]}},
        "present": ["decode"],
        "missing_worker_types": ["prefill"],
    }
    with pytest.raises(ModelNotReady):
        models.find("m")
    prefill = await fleet.worker(BUILTIN_MODEL, worker_type="prefill", path="dynamo.prefill.generate")
    await wait_for(lambda: is_ready(models))
    assert models.statuses()["m"].namespaces["dynamo"]["present"] == ["decode", "prefill"]
    assert not models.statuses()["m"].refused
    await prefill.close()
    await wait_for(lambda: is_ready(models) is None)


async def test_SCALE_03_models_that_come_and_go_leave_nothing_behind(fleet):
    models = await fleet.directory()
    core, requests = fleet.frontend.core, fleet.views.requests
    before = [len(found) for found in (requests.state.observers, core.renewals, core._cleanups)]
    used: tuple[int, ...] = ()

    for _ in range(3):
        worker = await fleet.worker(BUILTIN_MODEL)
        await wait_for(lambda: is_ready(models))
        assert await answers(models, count=2) == {mark(worker)}
        assert len(requests.state.observers) > before[0]
        assert core.pool._connections
        await worker.close()
        await wait_for(lambda: "m" not in models.statuses())
        await wait_for(lambda: not core.pool._connections)
        assert [len(found) for found in (requests.state.observers, core.renewals, core._cleanups)] == before
        used = used or open_things()
    # What the first round opened for good is not opened again.
    await wait_for(lambda: all(now <= first for now, first in zip(open_things(), used, strict=True)))


async def test_a_request_outlives_its_model(fleet):
    models = await fleet.directory()
    worker = await fleet.worker(BUILTIN_MODEL)
    await wait_for(lambda: is_ready(models))
    core, router = fleet.frontend.core, models.find("m").engine.router
    router.route(RoutingRequest("r1", [1, 2, 3]))
    await worker.close()
    await wait_for(lambda: "m" not in models.statuses())
    assert router.announce_open in core.renewals
    router.release("r1")
    assert router.announce_open not in core.renewals

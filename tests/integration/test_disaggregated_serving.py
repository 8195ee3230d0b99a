"""A whole frontend over prefill and decode workers, on the real request plane, in one process."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from dynamo_es.config.tree import WorkerConfig
from dynamo_es.log.base import TopicPartition
from dynamo_es.router.active_sequences import NO_LOAD
from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.runtime.model_card import BUILTIN_MODEL, make_card, read_model_facts
from dynamo_es.runtime.request_server import Batch
from schemas.codec import TopicCodec
from schemas.registry import key_model
from schemas.requests import REQUESTS, Finished, PrefillCompleted, Routed
from tests.support.runtimes import FAST, make_runtime, wait_for
from tests.support.served_fleet import CHAT, COMPLETIONS, served_fleet

LONG = "The same long beginning of every prompt, many blocks of it, so that a cache is worth something. " * 3


@pytest.fixture
async def fleet():
    async with served_fleet() as fleet:
        yield fleet


async def events(fleet, finished):
    """What the log has of requests, once it has so many ends."""
    await fleet.core.buffer.flush(5)
    topic = REQUESTS.qualified("dynamo")
    reader = fleet.log.reader({TopicPartition(topic, number): 0 for number in range(REQUESTS.partitions)})
    codec, found = TopicCodec(REQUESTS), []
    async with asyncio.timeout(60):
        while sum(isinstance(event, Finished) for event in found) < finished:
            for records in (await reader.poll(timeout_s=1)).values():
                found.extend(codec.decode(record.value, record.headers) for record in records)
    await reader.close()
    return found


def kinds(fleet):
    """Ids of the serving workers by type."""
    state = fleet.core.registry.state
    found = {}
    for card in state.models.values():
        found.setdefault(card.worker_type, set()).add(card.instance_id)
    return found


async def test_a_request_is_prefilled_by_one_worker_and_answered_by_another(fleet):
    await fleet.mock_worker(worker_type="prefill", wait=False)
    await fleet.mock_worker(worker_type="decode")
    alone = await fleet.ask(COMPLETIONS, prompt=LONG, max_tokens=5)
    assert alone.status == 200
    assert alone.json()["usage"]["completion_tokens"] == 5
    found = await events(fleet, 2)
    routed = {event.stage: event for event in found if isinstance(event, Routed)}
    types = kinds(fleet)
    assert routed["prefill"].worker_id in types["prefill"]
    assert routed["decode"].worker_id in types["decode"]
    assert routed["prefill"].request_id == routed["decode"].request_id
    assert (routed["prefill"].prefill_tokens, routed["decode"].prefill_tokens) == (routed["prefill"].isl_tokens, 0)
    ends = {event.attempt: (event.outcome, event.output_tokens) for event in found if isinstance(event, Finished)}
    assert ends == {routed["prefill"].attempt: ("ok", 1), routed["decode"].attempt: ("ok", 5)}
    assert [event.attempt for event in found if isinstance(event, PrefillCompleted)] == [routed["prefill"].attempt]


async def test_the_answer_is_that_of_an_aggregated_worker(fleet):
    stop = await fleet.mock_worker()
    expected = (await fleet.ask(CHAT, max_tokens=12)).json()["choices"]
    stop.set()
    await wait_for(lambda: "m" not in fleet.models.statuses())
    await fleet.mock_worker(worker_type="prefill", wait=False)
    await fleet.mock_worker(worker_type="decode")
    assert (await fleet.ask(CHAT, max_tokens=12)).json()["choices"] == expected
    streamed = await fleet.ask(CHAT, max_tokens=12, stream=True)
    assert streamed.status == 200
    assert "[DONE]" in streamed.text
    several = (await fleet.ask(COMPLETIONS, prompt=["a", "b"], n=2, temperature=1.0, max_tokens=2)).json()
    assert len(several["choices"]) == 4


async def test_prompts_go_where_they_are_cached_and_the_usage_says_so(fleet):
    for number in range(2):
        await fleet.mock_worker(worker_type="prefill", wait=False)
        await fleet.mock_worker(worker_type="decode", wait=number == 1)
    await wait_for(lambda: all(len(found) == 2 for found in kinds(fleet).values()))
    await fleet.ask(COMPLETIONS, prompt=LONG, max_tokens=1)
    index = fleet.views.kv_index.state
    await wait_for(
        lambda: sum(
            source.counts[0] for source in index.sources.values() if source.key.worker_id in kinds(fleet)["prefill"]
        )
    )
    again = (await fleet.ask(COMPLETIONS, prompt=LONG, max_tokens=1)).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 256
    routed = [event for event in await events(fleet, 4) if isinstance(event, Routed) and event.stage == "prefill"]
    assert len({event.worker_id for event in routed}) == 1
    assert max(event.overlap_blocks for event in routed) >= 16


async def test_the_model_is_ready_only_with_both_kinds(fleet):
    await fleet.mock_worker(worker_type="decode", wait=False)
    await wait_for(lambda: "m" in fleet.models.statuses())
    reply = await fleet.get("/v1/models/m/ready")
    assert reply.status == 503
    assert reply.json()["namespaces"]["dynamo"]["missing_worker_types"] == ["prefill"]
    assert (await fleet.ask(CHAT)).status == 503
    stop = await fleet.mock_worker(worker_type="prefill")
    kinds_shown = (await fleet.get("/v1/models/m/ready")).json()["namespaces"]["dynamo"]["worker_types"]
    assert kinds_shown == {
        "decode": {"workers": 1, "needs": [["prefill"]]}, "prefill": {"workers": 1, "needs": [["decode"]]},
    }  # fmt: skip
    assert (await fleet.ask(CHAT, max_tokens=2)).status == 200
    stop.set()
    await wait_for(lambda: not fleet.models.statuses()["m"].ready)
    assert (await fleet.ask(CHAT)).status == 503


async def test_a_prefill_worker_with_another_tokenizer_is_not_used(fleet):
    smollm = str(Path(__file__).parent.parent / "data" / "models" / "smollm2-135m-instruct")
    await fleet.mock_worker(worker_type="decode", wait=False)
    await fleet.mock_worker(WorkerConfig(model_name="m", model_path=smollm), worker_type="prefill", wait=False)
    await wait_for(lambda: (status := fleet.models.statuses().get("m")) is not None and status.refused)
    assert not fleet.models.statuses()["m"].ready
    await fleet.mock_worker(worker_type="prefill")
    assert (await fleet.ask(CHAT, max_tokens=2)).status == 200


async def test_LOAD_08_many_requests_at_once_end_with_no_load_anywhere(fleet):
    for number in range(2):
        await fleet.mock_worker(worker_type="prefill", wait=False)
        await fleet.mock_worker(worker_type="decode", wait=number == 1)
    await wait_for(lambda: all(len(found) == 2 for found in kinds(fleet).values()))
    replies = await asyncio.gather(
        *(
            fleet.ask(COMPLETIONS, prompt=f"{number} {LONG}", max_tokens=20, stream=number % 2 == 0)
            for number in range(20)
        )
    )
    assert {reply.status for reply in replies} == {200}
    found = await events(fleet, 40)
    sent = Counter(event.worker_id for event in found if isinstance(event, Routed))
    assert len(sent) == 4
    assert {event.outcome for event in found if isinstance(event, Finished)} == {"ok"}
    ((_, engine),) = fleet.models.routers()
    for router in (engine.router, await engine.disagg._prefill()):
        assert router.open_requests == 0
        for worker in sent:
            assert router._sequences.load((worker, 0)) == NO_LOAD


async def test_conditional_disaggregation_leaves_cached_prompts_to_the_decode_worker():
    async with served_fleet(settings=KvRouterSettings(conditional_disagg_enabled=True)) as fleet:
        await fleet.mock_worker(worker_type="prefill", wait=False)
        await fleet.mock_worker(worker_type="decode")
        decode = kinds(fleet)["decode"]
        index = fleet.views.kv_index.state
        await fleet.ask(COMPLETIONS, prompt=LONG, max_tokens=2)
        await wait_for(lambda: sum(s.counts[0] for s in index.sources.values() if s.key.worker_id in decode))
        again = (await fleet.ask(COMPLETIONS, prompt=LONG + "And?", max_tokens=2)).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 256
        await fleet.ask(COMPLETIONS, prompt="Another one. " + LONG, max_tokens=2)
        stages = Counter(event.stage for event in await events(fleet, 5) if isinstance(event, Routed))
        assert stages == {"prefill": 2, "decode": 2, "": 1}
        ((_, engine),) = fleet.models.routers()
        assert (engine.disagg.counters.kept_local, engine.disagg.counters.result) == (1, 2)


async def typed_worker(fleet, worker_type, handler, runtime_config=None):
    """A worker of the model ``m`` whose answers a test writes; its runtime."""
    runtime = make_runtime(fleet.log, runtime=dataclasses.replace(FAST, drain_timeout_s=0.1))
    await runtime.core.start()
    where = ("dynamo", worker_type, "generate")
    fleet._runtimes.append((runtime, asyncio.create_task(runtime.endpoint(".".join(where)).serve_endpoint(handler))))
    card = make_card(
        read_model_facts(BUILTIN_MODEL), where, runtime.core.instance_id, name="m", block_size=16,
        runtime_config=runtime_config or {}, worker_type=worker_type,
        needs=[["decode" if worker_type == "prefill" else "prefill"]],
        model_type="" if worker_type == "prefill" else "Chat | Completions",
    )  # fmt: skip
    await runtime.core.registration.register(key_model(*where, runtime.core.instance_id), card)
    return runtime


async def test_workers_with_a_bootstrap_address_meet_in_a_room(fleet):
    """The prefill worker answers only after the decode worker asked for the room: both must be running."""
    rooms, seen = {}, []

    async def prefill(request, context):
        info = request["bootstrap_info"]
        seen.append(("prefill", request["stop_conditions"]["max_tokens"], info["bootstrap_host"]))
        await rooms.setdefault(info["bootstrap_room"], asyncio.Event()).wait()
        yield Batch([{"token_ids": [5]}])

    async def decode(request, context):
        info = request["bootstrap_info"]
        seen.append(("decode", request["stop_conditions"]["max_tokens"], info["bootstrap_port"]))
        rooms.setdefault(info["bootstrap_room"], asyncio.Event()).set()
        yield Batch([{"token_ids": [72, 105]}, {"token_ids": [], "finish_reason": "stop"}])

    address = {"disaggregated_endpoint": {"bootstrap_host": "10.0.0.7", "bootstrap_port": 8998}}
    await typed_worker(fleet, "prefill", prefill, address)
    await typed_worker(fleet, "decode", decode)
    await wait_for(lambda: (status := fleet.models.statuses().get("m")) is not None and status.ready)
    async with asyncio.timeout(60):
        replies = await asyncio.gather(*(fleet.ask(COMPLETIONS, max_tokens=7) for _ in range(3)))
    assert [reply.json()["choices"][0]["text"] for reply in replies] == ["Hi"] * 3
    assert len(rooms) == 3
    assert sorted(seen) == [("decode", 7, 8998)] * 3 + [("prefill", 1, "10.0.0.7")] * 3
    assert {event.outcome for event in await events(fleet, 6) if isinstance(event, Finished)} == {"ok"}


async def test_a_prefill_worker_that_dies_fails_the_request_and_not_the_fleet(fleet):
    asked = asyncio.Event()

    async def prefill(request, context):
        asked.set()
        await asyncio.Event().wait()
        yield Batch([])

    async def decode(request, context):
        yield Batch([{"token_ids": [72], "finish_reason": "stop"}])

    dying = await typed_worker(fleet, "prefill", prefill)
    await typed_worker(fleet, "decode", decode)
    await wait_for(lambda: (status := fleet.models.statuses().get("m")) is not None and status.ready)
    asking = asyncio.create_task(fleet.ask(CHAT, max_tokens=2))
    await asked.wait()
    await dying.core.close()
    async with asyncio.timeout(60):
        assert (await asking).status == 503
    assert [event.stage for event in await events(fleet, 1) if isinstance(event, Routed)] == ["prefill"]

"""The vLLM engine at the boundary of vLLM: stages of a request, ranks, adapters, and statistics. vLLM is not needed."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_es.engines.lora.errors import AdapterConflict, AdapterNotHere
from dynamo_es.engines.vllm_engine.arguments import event_addresses, of_rank
from dynamo_es.engines.vllm_engine.engine import VllmEngine
from dynamo_es.engines.vllm_engine.handover import check_connector
from dynamo_es.engines.vllm_engine.stats import EngineLoad, EnginePass
from dynamo_es.errors import ConfigError, EngineShutdown, InvalidArgument, StreamIncomplete, Unknown
from dynamo_es.router.hashing import lora_name_to_id
from dynamo_es.runtime.context import Context
from tests.support import fake_vllm
from tests.support.fake_vllm import FakeLLM, answer, install
from tests.support.runtimes import wait_for

REQUEST: dict[str, Any] = {
    "token_ids": [5, 6, 7],
    "stop_conditions": {"max_tokens": 100, "stop_token_ids": [9]},
    "sampling_options": {"temperature": 0.5, "n": 2},
    "output_options": {"logprobs": 1},
}
WHERE = {"remote_engine_id": "e", "remote_block_ids": [[3, 4]], "remote_host": "h", "remote_port": 5600}


@asynccontextmanager
async def engine(
    stage: str = "aggregated", connector: str | None = "NixlConnector", **parallel: Any
) -> AsyncIterator[tuple[VllmEngine, FakeLLM, list[EngineLoad]]]:
    loads: list[EngineLoad] = []
    with pytest.MonkeyPatch.context() as patch:
        made = install(patch, fake_vllm.config(**parallel))
        ours = VllmEngine(fake_vllm.arguments(connector), loads.append, stage)
        try:
            yield ours, made[0], loads
        finally:
            await ours.close()


async def frames_of(ours: VllmEngine, request: dict[str, Any]) -> list[dict[str, Any]]:
    async with aclosing(ours.generate(request, Context())) as batches:
        return [frame async for frames in batches for frame in frames]


async def test_a_prefill_engine_computes_one_token_and_says_where_the_blocks_are() -> None:
    async with engine("prefill") as (ours, vllm, _):
        vllm.outputs = [answer([8], finish_reason="length", finished=True, kv_transfer_params=WHERE)]
        (frame,) = await frames_of(ours, REQUEST)
        assert frame["disaggregated_params"] == {"kv_transfer_params": WHERE}
        params, _ = vllm.asked[0]
        told = params.pop("extra_args")["kv_transfer_params"]
        assert (told["do_remote_decode"], told["do_remote_prefill"], told["remote_block_ids"]) == (True, False, None)
        assert params == {
            "temperature": 0.5, "n": 1, "max_tokens": 1, "min_tokens": 1, "ignore_eos": True, "detokenize": False,
            "output_kind": "delta",
        }  # fmt: skip


async def test_a_decode_engine_tells_its_connector_what_the_other_one_said() -> None:
    async with engine("decode") as (ours, vllm, _):
        vllm.outputs = [answer([8], finish_reason="stop", finished=True)]
        result = {"disaggregated_params": {"kv_transfer_params": WHERE}, "prompt_tokens_details": None}
        await frames_of(ours, REQUEST | {"prefill_result": result})
        await frames_of(ours, REQUEST)  # One that comes without is computed here.
        (first, _), (second, _) = vllm.asked
        assert first["extra_args"] == {"kv_transfer_params": WHERE}
        assert (first["max_tokens"], first["stop_token_ids"], first["n"]) == (100, [9], 2)
        assert "extra_args" not in second
        for wrong in (3, {}, {"disaggregated_params": {}}, {"disaggregated_params": {"kv_transfer_params": [1]}}):
            with pytest.raises(InvalidArgument, match="prefill_result"):
                await frames_of(ours, REQUEST | {"prefill_result": wrong})


async def test_where_prompts_are_shared_nothing_is_told() -> None:
    async with engine("prefill", "ExampleConnector") as (ours, vllm, _):
        vllm.outputs = [answer([8], finish_reason="length", finished=True)]
        (frame,) = await frames_of(ours, REQUEST)
        assert frame["disaggregated_params"] == {"kv_transfer_params": None}
        assert "extra_args" not in vllm.asked[0][0]
    async with engine("decode", "ExampleConnector") as (ours, vllm, _):
        vllm.outputs = [answer([8], finish_reason="stop", finished=True)]
        await frames_of(ours, REQUEST | {"prefill_result": {"disaggregated_params": frame["disaggregated_params"]}})
        assert "extra_args" not in vllm.asked[0][0]


async def test_an_arriving_prompt_is_not_aborted_before_its_first_token() -> None:
    """The other side may still be writing into its blocks."""
    result = {"disaggregated_params": {"kv_transfer_params": WHERE}}
    for arrives in (True, False):
        async with engine("decode") as (ours, vllm, _):
            context = Context()
            vllm.computes.clear()
            request = REQUEST | ({"prefill_result": result} if arrives else {})
            async with aclosing(ours.generate(request, context)) as batches:
                first = asyncio.ensure_future(anext(batches))
                await wait_for(lambda engine=vllm: engine.asked)
                context.stop_generating()
                await asyncio.sleep(0)
                assert vllm.calls == ([] if arrives else [("abort",)])
                vllm.computes.set()
                with pytest.raises(StopAsyncIteration):
                    await first


@pytest.mark.parametrize(("stage", "name"), [("prefill", None), ("decode", None), ("decode", "MooncakeConnector")])
def test_a_stage_needs_a_connector_that_is_known(stage: str, name: str | None) -> None:
    with pytest.raises(ConfigError, match=f"--kv-transfer-config .* a {stage} worker hands over with one of Example"):
        check_connector(name, stage)


def test_a_whole_worker_takes_any_connector() -> None:
    check_connector(None, "aggregated")
    check_connector("OffloadingConnector", "aggregated")


@pytest.mark.parametrize(
    ("parallel", "ranks", "place"),
    [
        ({"data_parallel_size": 4}, range(4), lambda rank: rank),
        (
            {
                "data_parallel_size": 8,
                "local_engines_only": True,
                "data_parallel_rank": 4,
                "data_parallel_size_local": 2,
            },
            range(4, 6),
            lambda rank: rank - 4,
        ),
        ({}, range(1), lambda rank: None),
    ],
)
async def test_a_request_reaches_the_rank_that_it_names(parallel: dict[str, Any], ranks: range, place: Any) -> None:
    async with engine(**parallel) as (ours, vllm, _):
        assert (ours.facts.first_rank, ours.facts.ranks) == (ranks.start, len(ranks))
        vllm.outputs = [answer([8], finish_reason="stop", finished=True)]
        await frames_of(ours, REQUEST)
        for rank in ranks:
            await frames_of(ours, REQUEST | {"routing": {"dp_rank": rank}})
        assert [more.get("data_parallel_rank") for _, more in vllm.asked] == [None, *map(place, ranks)]
        for wrong in (ranks.start - 1, ranks.stop, "0"):
            with pytest.raises(InvalidArgument, match="dp_rank"):
                await frames_of(ours, REQUEST | {"routing": {"dp_rank": wrong}})


def test_each_rank_has_event_sockets_of_its_own() -> None:
    """Where vLLM puts them (``ZmqEventPublisher.offset_endpoint_port``)."""
    events, replay = event_addresses(Path("/tmp/x"))
    found = [of_rank(address, rank) for address in (events, replay) for rank in range(3)]
    assert len(set(found)) == 6
    assert (found[0], found[2]) == (events, f"{events}_dp2")
    assert of_rank("tcp://*:5557", 0) == "tcp://127.0.0.1:5557"
    assert of_rank("tcp://*:5557", 2) == "tcp://127.0.0.1:5559"


async def test_steps_are_loads_and_passes_of_their_rank() -> None:
    async with engine(data_parallel_size=2) as (_, vllm, loads):
        details = SimpleNamespace(
            is_dummy=False, num_ctx_requests=2, num_ctx_tokens=40, num_generation_requests=3, num_generation_tokens=3,
            elapsed_ms=12.0,
        )  # fmt: skip
        stats = SimpleNamespace(
            kv_cache_usage=0.1, num_running_reqs=5, num_waiting_reqs=1, num_skipped_waiting_reqs=2,
            iteration_details=details,
        )  # fmt: skip
        logger = vllm.loggers[0](vllm.vllm_config, 1)
        logger.record(stats, None)
        logger.record(None, None)
        details.is_dummy = True
        logger.record(stats, None)
        assert loads == [
            EngineLoad(1, 10, 100, 5, 3, EnginePass(2, 40, 3, 120, 0.012)),
            EngineLoad(1, 10, 100, 5, 3),
        ]


async def test_adapters_come_and_go_and_a_name_comes_back_only_with_an_empty_cache() -> None:
    number = lora_name_to_id("poet")
    async with engine() as (ours, vllm, _):
        vllm.outputs = [answer([8], finish_reason="stop", finished=True)]
        assert ours.facts.max_loras == 2
        request = REQUEST | {"routing": {"lora_name": "poet"}}
        with pytest.raises(AdapterNotHere, match="no LoRA adapter 'poet'"):
            await frames_of(ours, request)
        vllm.misfit = "/bad"
        with pytest.raises(InvalidArgument, match="vLLM does not take the adapter poet in /bad: Call to add_lora"):
            await ours.load_adapter("poet", "/bad")
        await ours.load_adapter("poet", "/one")
        await frames_of(ours, request)
        (_, more) = vllm.asked[-1]
        assert (more["lora_request"].lora_name, more["lora_request"].lora_int_id) == ("poet", number)
        await ours.unload_adapter("poet")
        with pytest.raises(AdapterNotHere, match="no LoRA adapter"):
            await frames_of(ours, request)
        vllm.resets = False
        with pytest.raises(AdapterConflict, match="earlier adapter 'poet'"):
            await ours.load_adapter("poet", "/two")
        vllm.resets = True
        await ours.load_adapter("poet", "/two")
        assert vllm.calls == [
            ("add", "poet", "/one"),
            ("remove", number),
            ("reset",),
            ("reset",),
            ("add", "poet", "/two"),
        ]


async def test_an_adapter_that_goes_waits_for_its_requests_and_ends_those_that_stay() -> None:
    request = REQUEST | {"routing": {"lora_name": "poet"}}
    async with engine() as (ours, vllm, _):
        await ours.load_adapter("poet", "/one")
        async with aclosing(ours.generate(request, Context())) as batches:
            await anext(batches)
            unloading = asyncio.create_task(ours._adapters.unload("poet", finish_s=0.0))
            with pytest.raises(StreamIncomplete, match="'poet' is being unloaded"):
                await anext(batches)
        await unloading
        assert [call[0] for call in vllm.calls] == ["add", "abort", "remove"]
        await ours.load_adapter("cook", "/two")
        async with aclosing(ours.generate(REQUEST | {"routing": {"lora_name": "cook"}}, Context())) as batches:
            await anext(batches)
            unloading = asyncio.create_task(ours.unload_adapter("cook"))
            await wait_for(lambda: "cook" not in ours._adapters._held)
            assert not unloading.done()
        await unloading


async def test_an_adapter_goes_although_a_client_takes_nothing_more() -> None:
    """Its generator stands at its last frames: nothing wakes it."""
    request = REQUEST | {"routing": {"lora_name": "poet"}}
    async with engine() as (ours, vllm, _):
        await ours.load_adapter("poet", "/one")
        async with aclosing(ours.generate(request, Context())) as batches:
            await anext(batches)
            async with asyncio.timeout(60):
                await ours._adapters.unload("poet", finish_s=0.0, abort_s=0.0)
            assert [call[0] for call in vllm.calls] == ["add", "abort", "remove"]
            # Under its name another one comes and goes: what is left of the first is none of its requests.
            await ours.load_adapter("poet", "/two")
            with pytest.raises(StreamIncomplete, match="'poet' is being unloaded"):
                await anext(batches)
        async with aclosing(ours.generate(request, Context())) as batches:
            await anext(batches)
            unloading = asyncio.create_task(ours.unload_adapter("poet"))
            await wait_for(lambda: "poet" not in ours._adapters._held)
            assert not unloading.done()
        await unloading


async def test_an_adapter_that_vllm_did_not_drop_is_dropped_at_the_next_try() -> None:
    request = REQUEST | {"routing": {"lora_name": "poet"}}
    for again in ("unload", "load"):
        async with engine() as (ours, vllm, _):
            await ours.load_adapter("poet", "/one")
            vllm.errors["remove_lora"] = Exception("Call to remove_lora method failed")
            with pytest.raises(Unknown, match="vLLM: Call to remove_lora method failed"):
                await ours.unload_adapter("poet")
            with pytest.raises(AdapterNotHere):
                await frames_of(ours, request)
            del vllm.errors["remove_lora"]
            if again == "unload":
                await ours.unload_adapter("poet")
            else:
                await ours.load_adapter("poet", "/two")
            assert [call[0] for call in vllm.calls][:2] == ["add", "remove"]
            assert (vllm.calls[-1] == ("add", "poet", "/two")) is (again == "load")


@pytest.mark.parametrize("call", ["add_lora", "remove_lora", "reset_prefix_cache", "abort"])
async def test_an_engine_that_is_dead_is_not_the_adapters_fault(call: str) -> None:
    request = REQUEST | {"routing": {"lora_name": "poet"}}
    async with engine() as (ours, vllm, _):
        if call != "add_lora":
            await ours.load_adapter("poet", "/one")
        if call == "reset_prefix_cache":
            await ours.unload_adapter("poet")
        vllm.errors[call] = fake_vllm.EngineDeadError()
        async with aclosing(ours.generate(request if call == "abort" else REQUEST, Context())) as batches:
            await anext(batches)
            with pytest.raises(EngineShutdown, match="broke down"):
                if call in ("add_lora", "reset_prefix_cache"):
                    await ours.load_adapter("poet", "/one")
                else:
                    await ours._adapters.unload("poet", finish_s=0.0)


async def test_a_request_that_is_stopped_at_a_dead_engine_leaves_no_error_to_nobody() -> None:
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    async with engine() as (ours, vllm, _):
        vllm.errors["abort"] = fake_vllm.EngineDeadError()
        context = Context()
        async with aclosing(ours.generate(REQUEST, context)) as batches:
            await anext(batches)
            context.stop_generating()
            await wait_for(lambda: not ours._aborts)
    gc.collect()
    assert not told


async def test_an_adapters_name_is_a_text() -> None:
    async with engine() as (ours, vllm, _):
        with pytest.raises(InvalidArgument, match="lora_name must be a string"):
            await frames_of(ours, REQUEST | {"routing": {"lora_name": ["poet"]}})
        assert not vllm.asked


async def test_what_vllm_fails_with_is_told_apart() -> None:
    async with engine() as (ours, vllm, _):
        for error, told in ((fake_vllm.EngineDeadError(), EngineShutdown), (ValueError("no"), InvalidArgument)):
            vllm.error = error
            with pytest.raises(told):
                await frames_of(ours, REQUEST)
        assert not ours._open

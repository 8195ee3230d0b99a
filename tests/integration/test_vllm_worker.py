"""vLLM workers behind a whole frontend, with a stand-in for vLLM: stages, cards, metrics, adapters."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.config.lora_options import LoraConfig
from dynamo_es.config.tree import FrontendConfig, LogConfig, StateConfig, WorkerConfig
from dynamo_es.config.vllm_options import VllmConfig
from dynamo_es.engines.vllm_engine import worker as worker_module
from dynamo_es.engines.vllm_engine.worker import VllmWorkerSettings, run_vllm_worker
from dynamo_es.log.base import TopicPartition
from dynamo_es.runtime.core import RuntimeSettings
from schemas.codec import TopicCodec
from schemas.forward_pass import FORWARD_PASS
from tests.support import fake_vllm
from tests.support.fake_vllm import answer
from tests.support.runtimes import PATIENT, SharedLog, wait_for
from tests.support.served_fleet import COMPLETIONS, served_fleet

MODEL = str(Path(__file__).parents[1] / "data/models/smollm2-135m-instruct")
PROMPT = list(range(100, 180))
WHERE = {"remote_engine_id": "e", "remote_block_ids": [[3, 4]]}


@asynccontextmanager
async def worker(fleet, config, kind="aggregated", connector=None, lora=None):
    """A worker of the fleet, and what stands for its engine."""
    settings = VllmWorkerSettings(
        RuntimeSettings(LogConfig(url="memory://"), StateConfig(flush_interval_s=0.2), PATIENT, "worker"),
        WorkerConfig(model_path=MODEL, model_name="m"), (), VllmConfig(kind), lora or LoraConfig(),
    )  # fmt: skip
    stop, ready = asyncio.Event(), []
    with pytest.MonkeyPatch.context() as patch:
        made = fake_vllm.install(patch, config)
        patch.setattr(worker_module, "engine_arguments", lambda *_, **__: fake_vllm.arguments(connector))
        task = asyncio.create_task(
            run_vllm_worker(
                settings, stop, clock=SystemClock(), rng=random.SystemRandom(), log=SharedLog(fleet.log),
                on_ready=ready.append,
            )
        )  # fmt: skip
        try:
            await wait_for(lambda: ready or task.done())
            if task.done():
                task.result()
            yield made[0], ready[0]
        finally:
            stop.set()
            await task


async def test_a_prompt_goes_to_a_prefill_worker_and_its_connectors_word_to_the_decode_worker():
    async with (
        served_fleet(config=FrontendConfig(router_mode="kv"), runtime=PATIENT) as fleet,
        worker(fleet, fake_vllm.config(), "prefill", "NixlConnector") as (prefill, _),
        worker(fleet, fake_vllm.config(), "decode", "NixlConnector") as (decode, _),
    ):
        await wait_for(lambda: (status := fleet.models.statuses().get("m")) is not None and status.ready)
        prefill.outputs = [answer([8], finish_reason="length", finished=True, kv_transfer_params=WHERE)]
        decode.outputs = [answer([8]), answer([9], finish_reason="length", finished=True)]
        await wait_for(lambda: len(fleet.core.registry.state.models) == 2)
        cards = {card.worker_type: card for card in fleet.core.registry.state.models.values()}
        assert (cards["prefill"].component, cards["prefill"].model_type, cards["prefill"].needs) == (
            "prefill", "", [["decode"]],
        )  # fmt: skip
        assert (cards["decode"].component, cards["decode"].needs) == ("backend", [["prefill"]])
        reply = await fleet.ask(COMPLETIONS, prompt=PROMPT, max_tokens=2)
        assert (reply.status, reply.json()["usage"]["completion_tokens"]) == (200, 2)
        (first, _), (second, _) = prefill.asked[0], decode.asked[0]
        assert first["extra_args"]["kv_transfer_params"]["do_remote_decode"] is True
        assert second["extra_args"] == {"kv_transfer_params": WHERE}


async def passes_of(fleet):
    """What the log has of forward passes, up to the first that is no heartbeat at least."""
    topic, codec, found = FORWARD_PASS.qualified("dynamo"), TopicCodec(FORWARD_PASS), []
    reader = fleet.log.reader({TopicPartition(topic, number): 0 for number in range(FORWARD_PASS.partitions)})
    async with asyncio.timeout(60):
        while not any(one.wall_time_s for one in found):
            for records in (await reader.poll(timeout_s=1)).values():
                found.extend(codec.decode(record.value, record.headers) for record in records)
    await reader.close()
    return found


async def test_ranks_have_a_place_in_the_card_and_passes_of_their_own():
    config = fake_vllm.config(
        local_engines_only=True, data_parallel_size=8, data_parallel_rank=4, data_parallel_size_local=2
    )
    details = SimpleNamespace(
        is_dummy=False, num_ctx_requests=1, num_ctx_tokens=80, num_generation_requests=0, elapsed_ms=5.0
    )
    stats = SimpleNamespace(
        kv_cache_usage=0.05, num_running_reqs=1, num_waiting_reqs=2, num_skipped_waiting_reqs=0,
        iteration_details=details,
    )  # fmt: skip
    async with (
        served_fleet(config=FrontendConfig(router_mode="kv"), runtime=PATIENT) as fleet,
        worker(fleet, config) as (vllm, worker_id),
    ):
        await wait_for(lambda: "m" in fleet.models.statuses())
        (card,) = fleet.core.registry.state.models.values()
        places = card.runtime_config
        assert (places["data_parallel_start_rank"], places["data_parallel_size"]) == (4, 2)
        vllm.loggers[0](vllm.vllm_config, 5).record(stats, None)
        ranks, mine = fleet.views.worker_load.state.ranks, ("m", worker_id, 5)
        await wait_for(lambda: mine in ranks and ranks[mine].load and ranks[mine].forward_pass)
        assert (ranks[mine].load.kv_used_blocks, ranks[mine].load.running, ranks[mine].load.waiting) == (5, 1, 2)
        # Of later ones some are heartbeats, and those of the other rank are all.
        assert {key.dp_rank for key in ranks} <= {4, 5}
        told = [one for one in await passes_of(fleet) if one.wall_time_s]
        assert [(one.worker_id, one.dp_rank, one.wall_time_s) for one in told] == [(worker_id, 5, 0.005)]
        assert (told[0].scheduled.sum_prefill_tokens, told[0].queued.num_prefill_requests) == (80, 2)


async def test_adapters_are_told_to_vllm(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    lora = LoraConfig(enabled=True, sources=(f"file://{tmp_path}",))
    async with (
        served_fleet(config=FrontendConfig(router_mode="kv"), runtime=PATIENT) as fleet,
        worker(fleet, fake_vllm.config(), lora=lora) as (vllm, _),
    ):
        vllm.outputs = [answer([8], finish_reason="length", finished=True)]
        client = await fleet.frontend.endpoint("dynamo.backend.load_lora").client()
        await client.wait_for_instances()
        request = {"lora_name": "poet", "source": {"uri": f"file://{tmp_path}"}}
        (told,) = [item async for item in await client.random(request, annotated=False)]
        assert told["status"] == "success"
        await wait_for(lambda: (status := fleet.models.statuses().get("poet")) is not None and status.ready)
        assert (await fleet.ask(COMPLETIONS, model="poet", prompt=PROMPT, max_tokens=1)).status == 200
        assert vllm.asked[0][1]["lora_request"].lora_name == "poet"

"""Models whose workers register how they are to be routed (``register_model(router_config=…)``)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_es.config.tree import FrontendConfig
from dynamo_es.errors import ConfigError
from dynamo_es.frontend.card_routing import ModelRouting, routing_of, routing_to_helpers
from dynamo_es.llm import KvRouterConfig, ModelInput, ModelType, RouterConfig, RouterMode, WorkerType, register_model
from dynamo_es.models.card_json import router_config_body
from dynamo_es.router.config import KvRouterSettings
from dynamo_es.router.overload import BusyThresholds
from dynamo_es.runtime.request_server import Batch
from dynamo_es.runtime.runtime import DistributedRuntime
from tests.support.runtimes import make_runtime, wait_for
from tests.support.served_fleet import CHAT, ServedFleet, served_fleet
from tests.unit.frontend.fakes import card

SMOLLM = Path(__file__).parent.parent / "data" / "models" / "smollm2-135m-instruct"
ROUND_ROBIN = FrontendConfig(router_mode="round-robin", active_prefill_tokens_threshold=7)
OWN = ModelRouting(RouterMode.RoundRobin, KvRouterSettings(router_temperature=0.5), None, BusyThresholds(0.25))


async def answer(request: Any) -> AsyncIterator[Batch]:
    yield Batch([{"token_ids": [33], "finish_reason": "stop"}])


async def registered(fleet: ServedFleet, config: RouterConfig | None) -> tuple[DistributedRuntime, asyncio.Task[Any]]:
    """A worker that registers itself as a script does."""
    runtime = make_runtime(fleet.log)
    endpoint = runtime.endpoint("dynamo.backend.generate")
    serving = asyncio.create_task(endpoint.serve_endpoint(answer))  # type: ignore[arg-type]
    await register_model(
        ModelInput.Tokens, ModelType.Chat, endpoint, str(SMOLLM), "m",
        worker_type=WorkerType.Aggregated, router_config=config,
    )  # fmt: skip
    await wait_for(lambda: (status := fleet.models.statuses().get("m")) is not None and status.ready)
    return runtime, serving


@pytest.mark.parametrize("says", [True, False])
async def test_a_model_is_routed_as_its_workers_registered_and_else_as_the_frontend_was_told(says: bool) -> None:
    config = RouterConfig(
        RouterMode.KV, KvRouterConfig(router_temperature=0.25), active_decode_blocks_threshold=0.5,
        session_affinity_ttl_secs=60, session_affinity_mode="soft",
    )  # fmt: skip
    async with served_fleet(config=ROUND_ROBIN) as fleet:
        runtime, serving = await registered(fleet, config if says else None)
        try:
            assert (await fleet.ask(CHAT, max_tokens=1)).status == 200
            ((_, engine),) = fleet.models.routers()
            router = engine.router
            assert router.chooser.mode == ("kv" if says else "round-robin")
            affinity = router.affinity
            assert (affinity is not None and not affinity.settings.hard) is says
            expected = BusyThresholds(active_decode_blocks=0.5) if says else BusyThresholds(active_prefill_tokens=7)
            assert fleet.models.thresholds() == {"m": expected}
        finally:
            await runtime.close()
            await asyncio.gather(serving, return_exceptions=True)


def with_config(config: Any, **changes: Any) -> Any:
    body = router_config_body(config) if isinstance(config, RouterConfig) else config
    return card(details={"router_config": body}, **changes)


def test_what_a_card_says_replaces_the_options_but_for_files_of_this_process() -> None:
    assert routing_of(card(), OWN) is OWN
    own = ModelRouting(OWN.mode, KvRouterSettings(router_policy_config="/p", serve_indexer=True), None, OWN.thresholds)
    kv = KvRouterConfig(
        router_temperature=0.75, router_queue_policy="wspt", use_kv_events=False, router_approximate_cache_policy="lru"
    )
    found = routing_of(with_config(RouterConfig(RouterMode.KV, kv)), own)
    assert found.mode is RouterMode.KV
    assert (found.settings.router_temperature, found.settings.router_queue_policy) == (0.75, "wspt")
    assert (found.settings.router_policy_config, found.settings.serve_indexer) == ("/p", True)
    assert (found.affinity, found.thresholds) == (None, BusyThresholds())
    body = router_config_body(RouterConfig(RouterMode.KV, kv))
    body["kv_router_config"] |= {"router_policy_config": "/etc/passwd", "router_tracking_key_file": "/etc/passwd"}
    assert routing_of(with_config(body), own) == found


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"router_mode": "nonsense"}, "no member, or no value, 'nonsense'"),
        ({"kv_router_config": {"router_temperature": -1.0}}, "router_temperature"),
        ({"kv_router_config": {"nonsense": 1}}, "nonsense"),
        ({"kv_router_config": 5}, "items"),
        ({"kv_router_config": {"overlap_score_credit": 0.0}}, "serve_indexer requires overlap_score_credit > 0"),
        ({"session_affinity_ttl_secs": 0}, "session_affinity_ttl_secs must be between"),
        ({"load_threshold_config": {"active_decode_blocks_threshold": 2.0}}, "between 0.0 and 1.0, got 2"),
    ],
)
def test_a_card_that_makes_no_sense_is_told_with_its_worker(change: dict[str, Any], problem: str) -> None:
    body = router_config_body(RouterConfig(RouterMode.KV)) | change
    with pytest.raises(ConfigError, match=f"^router_config of worker 1: .*{problem}"):
        routing_of(
            with_config(body), ModelRouting(OWN.mode, KvRouterSettings(serve_indexer=True), None, OWN.thresholds)
        )


async def test_such_a_model_is_not_served_and_says_why() -> None:
    async with served_fleet(config=ROUND_ROBIN) as fleet:
        await fleet.worker(answer, wait=False, details={"router_config": {"router_mode": "nonsense"}})  # type: ignore[arg-type]
        await wait_for(
            lambda: "m" in fleet.models.statuses() and "nonsense" in str(fleet.models.statuses()["m"].reason)
        )
        assert (await fleet.ask(CHAT)).status == 503


def test_workers_of_one_name_must_agree_and_prefill_workers_need_not() -> None:
    from dynamo_es.frontend.membership import settle_membership

    kv, turns = RouterConfig(RouterMode.KV), RouterConfig(RouterMode.RoundRobin)
    model = with_config(turns, worker_type="decode")
    other = msgspec.structs.replace(with_config(kv, worker_type="decode"), instance_id=2)
    helper = msgspec.structs.replace(with_config(kv, worker_type="prefill", component="prefill"), instance_id=3)
    found = settle_membership([model, other, helper], model, lambda card: True, lambda card: 0)
    assert set(found.members) == {1}
    assert "its router_config differs" in found.refused[2].reason
    assert found.refused[2].remedy.startswith("register it with the same one, or")
    routing = routing_of(model, OWN)
    prefill = ("ns", "prefill", "generate")
    assert routing_to_helpers(found.helpers.values(), prefill, routing).mode is RouterMode.KV
    assert routing_to_helpers([], prefill, routing) is routing

from __future__ import annotations

import sys

import pytest

from dynamo_es.config.aic_options import AicConfig
from dynamo_es.config.tree import FrontendConfig, RouterConfig
from dynamo_es.errors import ConfigError
from dynamo_es.frontend.routing_plan import plan_routing

KV = FrontendConfig(router_mode="kv")
AIC = {"aic_backend": "vllm", "aic_system": "h200_sxm", "aic_model_path": "Qwen/Qwen3-32B"}


def test_by_default_nothing_is_kept_together_or_predicted():
    plan = plan_routing(FrontendConfig(), RouterConfig())
    assert (plan.affinity, plan.aic) == (None, None)


def test_sessions_are_kept_together_in_every_router_mode():
    plan = plan_routing(FrontendConfig(), RouterConfig(session_affinity_ttl_secs=30, session_affinity_mode="soft"))
    assert plan.affinity is not None
    assert (plan.affinity.ttl_s, plan.affinity.hard) == (30, False)


def test_aic_gets_its_deployment():
    plan = plan_routing(KV, RouterConfig(router_prefill_load_model="aic"), AicConfig(**AIC, aic_tp_size=4))
    assert plan.aic is not None
    assert {**AIC, "aic_tp_size": 4}.items() <= plan.aic.values().items()


async def test_without_the_extra_the_start_fails_and_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk", None)
    plan = plan_routing(KV, RouterConfig(router_prefill_load_model="aic"), AicConfig(**AIC))
    with pytest.raises(ConfigError, match="need the extra aic"):
        await plan.prefill_times()
    assert await plan_routing(KV, RouterConfig()).prefill_times() is None


@pytest.mark.parametrize(
    ("frontend", "router", "aic", "text"),
    [
        ({}, {"conditional_disagg_enabled": True}, {}, "--router-conditional-disagg requires --router-mode=kv"),
        (
            {"router_mode": "kv"}, {"conditional_disagg_enabled": True, "use_kv_events": False}, {},
            "--router-conditional-disagg requires --router-kv-events",
        ),
        ({}, {"router_prefill_load_model": "aic"}, AIC, "--router-prefill-load-model=aic requires --router-mode=kv"),
        (
            {"router_mode": "kv"}, {"router_prefill_load_model": "aic"}, {"aic_backend": "vllm"},
            "requires --aic-backend, --aic-system and --aic-model-path",
        ),
        (
            {"router_mode": "kv"}, {"router_prefill_load_model": "aic", "router_track_prefill_tokens": False}, AIC,
            "router_prefill_load_model requires router_track_prefill_tokens=true",
        ),
        ({"router_mode": "kv"}, {}, {"aic_tp_size": 2}, "--aic-tp-size requires --router-prefill-load-model=aic"),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other_are_refused_by_their_flags(frontend, router, aic, text):
    with pytest.raises(ConfigError, match=text):
        plan_routing(FrontendConfig(**frontend), RouterConfig(**router), AicConfig(**aic))

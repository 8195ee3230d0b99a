"""Configuration objects against results recorded from ai-dynamo-runtime 1.5.1."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo_es.router.config import KvRouterConfig
from dynamo_es.router.config_aic import AicPerfConfig
from dynamo_es.router.config_routing import LoadThresholdConfig, RouterConfig
from dynamo_es.router.config_selection import SelectionCacheConfig
from dynamo_es.router.constraints import RoutingConstraints
from dynamo_es.router.modes import RouterMode
from dynamo_es.router.selection_service import SelectionService

GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "router" / "config.json"
ERRORS = {kind.__name__: kind for kind in (TypeError, OverflowError, ValueError, AttributeError, Exception)}
FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
WEIGHTS = (
    "overlap_score_credit",
    "overlap_score_credit_decay",
    "overlap_score_weight",
    "prefill_load_scale",
    "decode_active_request_weight",
)
THRESHOLDS = (
    "active_decode_blocks_threshold",
    "active_prefill_tokens_threshold",
    "active_prefill_tokens_threshold_frac",
)
# Where ours is better. By kind and arguments: the class and the text that it raises instead.
DEPARTURES: dict[tuple[str, str], tuple[type[Exception], str]] = {
    # A panic is a BaseException, which no caller's ``except Exception`` catches: an ordinary ValueError, same text.
    ("SelectionCacheConfig", '{"ttl_secs": -1.0}'): (
        ValueError, "cannot convert float seconds to Duration: value is negative",
    ),
    ("SelectionCacheConfig", '{"ttl_secs": {"$float": "nan"}}'): (
        ValueError, "cannot convert float seconds to Duration: value is either too big or NaN",
    ),
    ("SelectionCacheConfig", '{"ttl_secs": 1e+30}'): (
        ValueError, "cannot convert float seconds to Duration: value is either too big or NaN",
    ),
    # The signature is a real one, which help() and editors show; Python's own refusal counts the class with the rest.
    # What is wrong with a value is a ValueError, which is an Exception.
    ("SelectionService", '{"replica_sync_port": 0}'): (ValueError, "replica sync port must be greater than zero"),
    ("SelectionService", '{"replica_sync_port": "<free port>", "replica_sync_peers": ["bad"]}'): (
        ValueError, "invalid replica peer endpoint `bad`",
    ),
    ("KvRouterConfig", "[2.0, 0.5, 0.5, 0.1, false, true]"): (
        TypeError, "KvRouterConfig.__new__() takes from 1 to 6 positional arguments but 7 were given",
    ),
}  # fmt: skip
# Recorded from ints, which the recording wrote as text.
INT_KEYS = {'[{"$set": ["1"]}]': [{1}], '[null, {"1": 1.0}]': [None, {1: 1.0}]}
# test_policy_config_golden.py has them.
ELSEWHERE = ("policy_yaml",)


def restore(value: dict[str, Any]) -> Any:
    if value.keys() == {"$float"}:
        return FLOATS[value["$float"]]
    return set(value["$set"]) if value.keys() == {"$set"} else value


def weights_of(config: KvRouterConfig) -> dict[str, float]:
    return {name: getattr(config, name) for name in WEIGHTS}


def build_kv_router_config(case: dict[str, Any]) -> Any:
    return weights_of(KvRouterConfig(*case["args"], **case["kwargs"]))


def set_weight(case: dict[str, Any]) -> Any:
    config = KvRouterConfig()
    copy = config.copy()
    try:
        setattr(config, case["attr"], case["value"])
    except Exception:
        assert weights_of(config) == weights_of(KvRouterConfig())
        raise
    return {"after": weights_of(config), "copy": weights_of(copy)}


def override_weights(case: dict[str, Any]) -> Any:
    config = KvRouterConfig()
    new = config.with_overrides(*case["args"], **case["kwargs"])
    return {"new": weights_of(new), "orig": weights_of(config)}


def read_json(case: dict[str, Any]) -> Any:
    return weights_of(KvRouterConfig.from_json(case["json"]))


def build_router_config(case: dict[str, Any]) -> Any:
    config = RouterConfig(RouterMode.KV, **case["kwargs"])
    return {"router_mode": repr(config.router_mode), "kv": weights_of(config.kv_router_config)}


def build_load_thresholds(case: dict[str, Any]) -> Any:
    config = LoadThresholdConfig(**case["kwargs"])
    return {name: getattr(config, name) for name in THRESHOLDS}


def build_constraints(case: dict[str, Any]) -> Any:
    constraints = RoutingConstraints(*case["args"], **case["kwargs"])
    return {
        "required_taints": sorted(constraints.required_taints),
        "preferred_taints": constraints.preferred_taints,
    }


def build_cache_config(case: dict[str, Any]) -> Any:
    return type(SelectionCacheConfig(**case["kwargs"])).__name__


def build_aic_config(case: dict[str, Any]) -> Any:
    return type(AicPerfConfig(*case["args"], **case["kwargs"])).__name__


def build_service(case: dict[str, Any]) -> Any:
    # Every recorded one is refused before it takes its port.
    port = {name: 1 for name, value in case["kwargs"].items() if value == "<free port>"}
    return type(SelectionService(**{**case["kwargs"], **port}, env={})).__name__


def list_modes(case: dict[str, Any]) -> Any:
    return {mode.name: {"repr": repr(mode), "int": int(mode)} for mode in RouterMode}


CALLS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "KvRouterConfig": build_kv_router_config,
    "KvRouterConfig.setattr": set_weight,
    "KvRouterConfig.with_overrides": override_weights,
    "KvRouterConfig.from_json": read_json,
    "RouterConfig": build_router_config,
    "RouterConfig.mode_str": lambda case: RouterConfig("kv"),
    "RouterConfig.no_args": lambda case: RouterConfig(),
    "RouterMode.members": list_modes,
    "LoadThresholdConfig": build_load_thresholds,
    "RoutingConstraints": build_constraints,
    "SelectionCacheConfig": build_cache_config,
    "AicPerfConfig": build_aic_config,
    "SelectionService": build_service,
}
RECORDED = [case for case in json.loads(GOLDEN.read_text())["cases"] if case["kind"] not in ELSEWHERE]


def name_of(case: dict[str, Any]) -> str:
    given = [case[key] for key in ("args", "kwargs", "json", "attr", "value") if case.get(key) not in (None, [], {})]
    return f"{case['kind']}({', '.join(json.dumps(value) for value in given)})"[:90]


@pytest.mark.parametrize("recorded", RECORDED, ids=name_of)
def test_results_and_errors_are_those_of_dynamo(recorded: dict[str, Any], tmp_path: Path) -> None:
    def restored(part: Any) -> Any:
        text = json.dumps(part).replace("<dir>", str(tmp_path))
        return INT_KEYS.get(text) or json.loads(text, object_hook=restore)

    case = {key: restored(value) for key, value in recorded.items()}
    result = case["result"]
    arguments = json.dumps(recorded.get("args") or recorded.get("kwargs"))
    departure = DEPARTURES.get((recorded["kind"], arguments))
    call = CALLS[recorded["kind"]]
    if "ok" in result:
        assert same(call(case), result["ok"])
        return
    kind, message = departure or (ERRORS[result["error"]["type"]], result["error"]["message"])
    with pytest.raises(kind) as caught:
        call(case)
    assert type(caught.value) is kind
    assert str(caught.value) == message


def test_every_departure_is_of_a_recorded_case() -> None:
    recorded = {(case["kind"], json.dumps(case.get("args") or case.get("kwargs"))) for case in RECORDED}
    assert set(DEPARTURES) <= recorded


def same(found: Any, recorded: Any) -> bool:
    """Equal, with NaN equal to itself and 1 not equal to 1.0 or True."""
    return json.dumps(found, sort_keys=True) == json.dumps(recorded, sort_keys=True)

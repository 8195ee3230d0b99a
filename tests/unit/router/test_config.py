"""Configuration objects where no recording speaks: copies, setters, digests, overrides, signatures."""

from __future__ import annotations

import inspect
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest

from dynamo_es.errors import ConfigError
from dynamo_es.router.config import KvRouterConfig, KvRouterSettings, check_settings, override_settings
from dynamo_es.router.config_aic import AicPerfConfig
from dynamo_es.router.config_routing import LoadThresholdConfig, RouterConfig
from dynamo_es.router.config_selection import SelectionCacheConfig
from dynamo_es.router.constraints import RoutingConstraints
from dynamo_es.router.kv_router import KvRouter
from dynamo_es.router.modes import RouterMode

PUBLIC = (KvRouterConfig, RouterConfig, LoadThresholdConfig, SelectionCacheConfig, RoutingConstraints, AicPerfConfig)
POLICY = """\
default_policy_family: std
uncached_isl_buckets: [{min_tokens: 0, bucket: all}]
policy_classes: [{name: a, policy_family: std, cache_bucket: all, quantum: 8}]
"""
# ``__text_signature__`` of the class in ai-dynamo-runtime 1.5.1.
DYNAMO_SIGNATURE = (
    'overlap_score_weight=None, host_cache_hit_weight=0.75, disk_cache_hit_weight=0.25, router_temperature=0.0, '
    'use_kv_events=True, *, router_replica_sync=False, router_track_active_blocks=True, '
    'router_track_output_blocks=False, router_assume_kv_reuse=True, router_track_prefill_tokens=True, '
    'router_prefill_load_model="none", router_ttl_secs=120.0, router_approximate_cache_policy="ttl", '
    'router_queue_threshold=None, router_event_threads=4, router_queue_policy="fcfs", use_remote_indexer=False, '
    'serve_indexer=False, shared_cache_multiplier=0.0, shared_cache_type="none", router_predicted_ttl_secs=None, '
    'conditional_disagg_enabled=False, conditional_disagg_policy="isl_bounding", '
    'conditional_disagg_eff_isl_threshold=2048, conditional_disagg_eff_isl_ratio_threshold=0.7, '
    'conditional_disagg_prefill_busy_threshold=None, conditional_disagg_decode_busy_threshold=None, '
    'overlap_score_credit=1.0, overlap_score_credit_decay=0.0, prefill_load_scale=1.0, '
    'decode_active_request_weight=0.0, router_policy_config=None, router_prefill_policy=None, '
    'router_decode_policy=None, router_tracking_hash="public-xxh3-v1", router_tracking_key_file=None, '
    'router_tracking_key_id=None'
)  # fmt: skip


def policy_file(folder: Path, text: str = POLICY, name: str = "p.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_the_signature_is_that_of_dynamo() -> None:
    parts = ["*" if item.kind is item.KEYWORD_ONLY else "" for item in parameters(KvRouterConfig)]
    star = parts.index("*")
    names = [
        f"{item.name}={item.default!r}".replace("'", '"') if item.default is not item.empty else item.name
        for item in parameters(KvRouterConfig)
    ]
    assert ", ".join([*names[:star], "*", *names[star:]]) == DYNAMO_SIGNATURE


@pytest.mark.parametrize("public", PUBLIC)
def test_every_argument_is_explained(public: type) -> None:
    for item in parameters(public):
        assert item.name in str(public.__doc__)


def parameters(public: type) -> list[inspect.Parameter]:
    return list(inspect.signature(public).parameters.values())


def test_defaults_are_those_of_the_settings() -> None:
    assert KvRouterConfig().settings == KvRouterSettings()


def test_every_argument_reaches_the_settings(tmp_path: Path) -> None:
    given = {
        "host_cache_hit_weight": 0.5, "disk_cache_hit_weight": 0.125, "router_temperature": 0.25,
        "use_kv_events": False, "router_replica_sync": True, "router_track_active_blocks": True,
        "router_track_output_blocks": True, "router_assume_kv_reuse": False, "router_track_prefill_tokens": True,
        "router_prefill_load_model": "aic", "router_ttl_secs": 3.0, "router_approximate_cache_policy": "lru",
        "router_queue_threshold": 2.0, "router_event_threads": 7, "router_queue_policy": "wspt",
        "use_remote_indexer": False, "serve_indexer": True, "shared_cache_multiplier": 0.5,
        "shared_cache_type": "hicache", "router_predicted_ttl_secs": None, "conditional_disagg_enabled": True,
        "conditional_disagg_policy": "isl_or_load", "conditional_disagg_eff_isl_threshold": 9,
        "conditional_disagg_eff_isl_ratio_threshold": 0.5, "conditional_disagg_prefill_busy_threshold": 4.0,
        "conditional_disagg_decode_busy_threshold": 5.0, "overlap_score_credit": 2.0,
        "overlap_score_credit_decay": 0.5, "prefill_load_scale": 3.0, "decode_active_request_weight": 6.0,
        "router_policy_config": policy_file(tmp_path), "router_prefill_policy": "p", "router_decode_policy": "d",
        "router_tracking_hash": "keyed-xxh3-v1", "router_tracking_key_file": str(tmp_path / "key"),
        "router_tracking_key_id": "epoch-1",
    }  # fmt: skip
    settings = KvRouterConfig(**given).settings
    assert {name: getattr(settings, name) for name in given} == given
    assert {field.name for field in fields(KvRouterSettings)} == {*given, "policy"}


def test_a_key_file_may_be_a_path_object(tmp_path: Path) -> None:
    config = KvRouterConfig(
        router_tracking_hash="keyed-xxh3-v1", router_tracking_key_file=tmp_path / "key", router_tracking_key_id="a"
    )
    assert config.settings.router_tracking_key_file == str(tmp_path / "key")
    with pytest.raises(TypeError, match=r"'router_tracking_key_file': expected str, bytes or os\.PathLike object"):
        KvRouterConfig(router_tracking_key_file=5)  # type: ignore[arg-type]


def test_only_the_weights_can_be_set() -> None:
    config = KvRouterConfig()
    for name in ("router_temperature", "settings", "anything"):
        with pytest.raises(AttributeError):
            setattr(config, name, 1.0)


def test_whatever_stands_for_a_real_number_is_one() -> None:
    class Half:
        def __float__(self) -> float:
            return 0.5

    assert KvRouterConfig(overlap_score_credit=Half()).overlap_score_credit == 0.5  # type: ignore[arg-type]


def test_a_copy_keeps_the_policy_without_reading_the_file_again(tmp_path: Path) -> None:
    path = policy_file(tmp_path)
    config = KvRouterConfig(router_policy_config=path)
    Path(path).unlink()
    for other in (config.copy(), config.with_overrides(2.0), RouterConfig(RouterMode.KV, config).kv_router_config):
        assert other.settings.policy == config.settings.policy
    config.overlap_score_credit = 0.5
    assert config.settings.policy is not None


def test_settings_with_the_same_values_have_the_same_digest(tmp_path: Path) -> None:
    digest = KvRouterSettings().digest()
    assert digest == KvRouterConfig().settings.digest()
    for field in fields(KvRouterSettings):
        if field.name not in ("router_policy_config", "policy"):
            assert replace(KvRouterSettings(), **{field.name: "other"}).digest() != digest, field.name
    same = [KvRouterConfig(router_policy_config=policy_file(tmp_path, name=name)) for name in ("a.yaml", "b.yaml")]
    other = KvRouterConfig(router_policy_config=policy_file(tmp_path, POLICY.replace("8", "9")))
    assert same[0].settings.digest() == same[1].settings.digest()
    assert len({digest, same[0].settings.digest(), other.settings.digest()}) == 3
    assert replace(KvRouterSettings(), router_ttl_secs=math.inf).digest() != digest


def test_settings_can_be_keys(tmp_path: Path) -> None:
    settings = KvRouterConfig(router_policy_config=policy_file(tmp_path)).settings
    assert {settings: 1}[KvRouterConfig(router_policy_config=policy_file(tmp_path)).settings] == 1


def test_words_are_checked_before_numbers_and_numbers_before_combinations() -> None:
    bad = {"router_queue_policy": "x", "router_temperature": -1.0, "router_predicted_ttl_secs": 1.0}
    expected = ["unknown queue policy", "router_temperature must", "router_predicted_ttl_secs requires"]
    for text in expected:
        with pytest.raises(ValueError, match=text):
            check_settings(replace(KvRouterSettings(use_kv_events=False), **bad))  # type: ignore[arg-type]
        bad.pop(next(iter(bad)))


def test_an_override_changes_what_a_request_may_change() -> None:
    settings = KvRouterSettings()
    changed = override_settings(
        settings,
        {
            "overlap_score_credit": 2, "prefill_load_scale": None, "router_temperature": 0.5, "assume_kv_reuse": False,
            "track_prefill_tokens": False, "shared_cache_multiplier": 0.25, "overlap_score_credit_decay": 9.0,
            "router_queue_policy": "nonsense",
        },
    )  # fmt: skip
    assert changed == replace(
        settings,
        overlap_score_credit=2.0,
        router_temperature=0.5,
        router_assume_kv_reuse=False,
        router_track_prefill_tokens=False,
        shared_cache_multiplier=0.25,
    )
    assert override_settings(settings, {}) is settings
    weighted = override_settings(settings, {"overlap_score_weight": 0, "prefill_load_scale": 5.0})
    assert (weighted.prefill_load_scale, weighted.overlap_score_credit) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("override", "kind", "text"),
    [
        ({"overlap_score_credit": "x"}, TypeError, "argument 'overlap_score_credit': must be real number, not str"),
        ({"assume_kv_reuse": 1}, TypeError, "argument 'assume_kv_reuse': 'int' object cannot be converted"),
        ({"overlap_score_weight": []}, TypeError, "argument 'overlap_score_weight': must be real number, not list"),
        ({"router_temperature": -1}, ValueError, "router_temperature must be greater than or equal to 0"),
    ],
)
def test_a_bad_override_is_refused(override: dict[str, object], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        override_settings(KvRouterSettings(), override)


def test_a_router_config_keeps_a_copy_and_gives_copies() -> None:
    config = KvRouterConfig(overlap_score_credit=0.5)
    routing = RouterConfig(RouterMode.KV, config, 0.75, 10, 1.5, False, 60, "soft")
    config.overlap_score_credit = 0.25
    routing.kv_router_config.overlap_score_credit = 0.125
    assert routing.kv_router_config.overlap_score_credit == 0.5
    thresholds = routing.load_thresholds
    assert thresholds.active_decode_blocks_threshold == 0.75
    assert thresholds.active_prefill_tokens_threshold == 10
    assert thresholds.active_prefill_tokens_threshold_frac == 1.5
    assert (routing.session_affinity_ttl_secs, routing.session_affinity_mode) == (60, "soft")


def test_mode_and_values_of_a_router_config_can_be_replaced() -> None:
    routing = RouterConfig(RouterMode.KV)
    routing.router_mode = RouterMode.Random
    routing.kv_router_config = KvRouterConfig(2.0)
    assert routing.router_mode is RouterMode.Random
    assert routing.kv_router_config.prefill_load_scale == 2.0
    with pytest.raises(TypeError, match="argument 'value': 'int' object cannot be converted to 'RouterMode'"):
        routing.router_mode = 3  # type: ignore[assignment]
    with pytest.raises(TypeError, match="argument 'value': 'int' object cannot be converted to 'KvRouterConfig'"):
        routing.kv_router_config = 3  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("value", "shown"), [(1e30, "1" + "0" * 30), (-1e-9, "-0.000000001"), (2.0, "2"), (-math.inf, "-inf")]
)
def test_numbers_in_messages_are_written_out(value: float, shown: str) -> None:
    with pytest.raises(ValueError) as caught:
        LoadThresholdConfig(active_decode_blocks_threshold=value)
    assert str(caught.value).endswith(f", got {shown}")


def test_load_thresholds_are_keywords_and_cannot_be_set() -> None:
    with pytest.raises(TypeError):
        LoadThresholdConfig(0.5)  # type: ignore[misc]
    with pytest.raises(AttributeError):
        LoadThresholdConfig().active_decode_blocks_threshold = 0.5  # type: ignore[misc]


def test_the_selection_cache_has_dynamos_defaults_and_bounds() -> None:
    defaults = SelectionCacheConfig(ttl_secs=None, max_entries=None, max_bytes=None)
    assert (defaults.ttl_secs, defaults.max_entries, defaults.max_bytes) == (120.0, 4096, 268_435_456)
    assert SelectionCacheConfig(ttl_secs=1.8e19).ttl_secs == 1.8e19
    with pytest.raises(ValueError, match="either too big or NaN"):
        SelectionCacheConfig(ttl_secs=2.0**64)


def test_constraints_give_copies_and_take_new_values() -> None:
    constraints = RoutingConstraints(frozenset({"a"}), {"b": 0.5})
    constraints.required_taints.add("x")
    constraints.preferred_taints["x"] = 1.0
    assert (constraints.required_taints, constraints.preferred_taints) == ({"a"}, {"b": 0.5})
    constraints.required_taints = {"z"}
    constraints.preferred_taints = None  # type: ignore[assignment]
    assert (constraints.required_taints, constraints.preferred_taints) == ({"z"}, {})


def test_aic_values_come_back_by_name() -> None:
    config = AicPerfConfig("vllm", "h200_sxm", "m", 2, aic_nextn=5, aic_gemm_dtype="fp8")
    values = config.values()
    assert list(values) == [item.name for item in parameters(AicPerfConfig)]
    assert (values["aic_tp_size"], values["aic_nextn"], values["aic_gemm_dtype"]) == (2, 5, "fp8")
    for nextn in (0, 6):
        with pytest.raises(ValueError, match=r"^aic_nextn must be 1\.\.=5 when set"):
            AicPerfConfig("vllm", "h200_sxm", "m", aic_nextn=nextn)


def test_modes_are_told_by_their_names() -> None:
    assert f"{RouterMode.LeastLoaded}" == repr(RouterMode.LeastLoaded) == "RouterMode.LeastLoaded"


def test_a_router_is_not_built_over_a_shared_cache_that_nobody_can_ask() -> None:
    with pytest.raises(ConfigError, match=r"shared_cache_type=hicache is not available: .* use 'none'"):
        KvRouter(None, 4, KvRouterConfig(shared_cache_type="hicache"))  # type: ignore[arg-type]

"""Settings from the environment and from flags (spec: router-core E, frontend 7)."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from dynamo_es.config.options import add_flags, load, options_of
from dynamo_es.config.tree import RouterConfig
from dynamo_es.errors import ConfigError
from dynamo_es.router.config import KvRouterSettings
from dynamo_es.router.config_options import settings_from_environment, settings_of, with_new_names

# What ai-dynamo-runtime 1.5.1 logs that it took from each variable.
TAKEN: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({"DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": "2"}, {"overlap_score_credit": 2.0}),
    ({"DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY": "0.5"}, {"overlap_score_credit_decay": 0.5}),
    ({"DYN_ROUTER_PREFILL_LOAD_SCALE": "3"}, {"prefill_load_scale": 3.0}),
    ({"DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT": "3"}, {"decode_active_request_weight": 3.0}),
    ({"DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT": "0"}, {"overlap_score_credit": 0.0, "prefill_load_scale": 0.0}),
    ({"DYN_OVERLAP_SCORE_WEIGHT": "2"}, {"prefill_load_scale": 2.0}),
    ({"DYN_OVERLAP_SCORE_WEIGHT": "2", "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT": "3"}, {"prefill_load_scale": 3.0}),
    ({"DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT": "2", "DYN_ROUTER_PREFILL_LOAD_SCALE": "3"}, {"prefill_load_scale": 2.0}),
    ({"DYN_ROUTER_HOST_CACHE_HIT_WEIGHT": "0.3"}, {"host_cache_hit_weight": 0.3}),
    ({"DYN_ROUTER_DISK_CACHE_HIT_WEIGHT": "0.2"}, {"disk_cache_hit_weight": 0.2}),
    ({"DYN_ROUTER_TEMPERATURE": "1e2"}, {"router_temperature": 100.0}),
    ({"DYN_ROUTER_USE_KV_EVENTS": " OFF"}, {"use_kv_events": False}),
    ({"DYN_USE_KV_EVENTS": "false"}, {"use_kv_events": False}),
    ({"DYN_USE_KV_EVENTS": "false", "DYN_ROUTER_USE_KV_EVENTS": "true"}, {}),
    ({"DYN_ROUTER_REPLICA_SYNC": "yes"}, {"router_replica_sync": True}),
    ({"DYN_ROUTER_TRACK_ACTIVE_BLOCKS": "0"}, {"router_track_active_blocks": False}),
    ({"DYN_ROUTER_TRACK_OUTPUT_BLOCKS": "on"}, {"router_track_output_blocks": True}),
    ({"DYN_ROUTER_ASSUME_KV_REUSE": "no"}, {"router_assume_kv_reuse": False}),
    ({"DYN_ROUTER_TRACK_PREFILL_TOKENS": "0"}, {"router_track_prefill_tokens": False}),
    ({"DYN_ROUTER_QUEUE_THRESHOLD": "1.5"}, {"router_queue_threshold": 1.5}),
    ({"DYN_ROUTER_QUEUE_THRESHOLD": "None"}, {}),
    ({"DYN_ROUTER_QUEUE_POLICY": "wspt"}, {"router_queue_policy": "wspt"}),
    ({"DYN_ROUTER_PREFILL_POLICY": "x"}, {"router_prefill_policy": "x"}),
    ({"DYN_ROUTER_DECODE_POLICY": "x"}, {"router_decode_policy": "x"}),
    ({"DYN_ROUTER_CONDITIONAL_DISAGG": "true"}, {"conditional_disagg_enabled": True}),
    ({"DYN_ROUTER_CONDITIONAL_DISAGG_POLICY": "prefill_load"}, {"conditional_disagg_policy": "prefill_load"}),
    (
        {"DYN_ROUTER_CONDITIONAL_DISAGG_EFF_ISL_THRESHOLD": "7"},
        {"conditional_disagg_eff_isl_threshold": 7},
    ),
    (
        {"DYN_ROUTER_CONDITIONAL_DISAGG_EFF_ISL_RATIO_THRESHOLD": "0.1"},
        {"conditional_disagg_eff_isl_ratio_threshold": 0.1},
    ),
    (
        {"DYN_ROUTER_CONDITIONAL_DISAGG_PREFILL_BUSY_THRESHOLD": "3"},
        {"conditional_disagg_prefill_busy_threshold": 3.0},
    ),
    (
        {"DYN_ROUTER_CONDITIONAL_DISAGG_DECODE_BUSY_THRESHOLD": "4"},
        {"conditional_disagg_decode_busy_threshold": 4.0},
    ),
    ({"DYN_ROUTER_PREDICTED_TTL_SECS": "5"}, {"router_predicted_ttl_secs": 5.0}),
    (
        {"DYN_ROUTER_APPROXIMATE_CACHE_POLICY": "lru", "DYN_ROUTER_USE_KV_EVENTS": "0"},
        {"use_kv_events": False, "router_approximate_cache_policy": "lru"},
    ),
    ({"DYN_ROUTER_TTL_SECS": "7"}, {"router_ttl_secs": 7.0}),
    ({"DYN_ROUTER_EVENT_THREADS": "8"}, {"router_event_threads": 8}),
    ({"DYN_USE_REMOTE_INDEXER": "true"}, {"use_remote_indexer": True}),
    ({"DYN_SERVE_INDEXER": "true"}, {}),
    ({"DYN_SHARED_CACHE_MULTIPLIER": "0.5"}, {"shared_cache_multiplier": 0.5}),
    (
        {
            "DYN_ROUTER_TRACKING_HASH": "keyed-xxh3-v1",
            "DYN_ROUTER_TRACKING_KEY_FILE": "/run/key",
            "DYN_ROUTER_TRACKING_KEY_ID": "a",
        },
        {
            "router_tracking_hash": "keyed-xxh3-v1",
            "router_tracking_key_file": "/run/key",
            "router_tracking_key_id": "a",
        },
    ),
]


@pytest.mark.parametrize(("env", "changes"), TAKEN, ids=["+".join(env) for env, _ in TAKEN])
def test_a_variable_sets_what_it_sets_in_dynamo(env: dict[str, str], changes: dict[str, Any]) -> None:
    assert settings_from_environment(env) == replace(KvRouterSettings(), **changes)


def test_every_setting_but_the_policy_can_be_set_by_flag_and_variable() -> None:
    named = {item.name: item.spec for item in options_of(RouterConfig)}
    for field in fields(KvRouterSettings):
        if field.name != "policy":
            assert named[field.name].env
            assert named[field.name].flag
    variables = [spec.env for spec in named.values()]
    assert len(set(variables)) == len(variables)


def test_an_empty_environment_gives_the_defaults_and_so_do_empty_variables() -> None:
    assert settings_from_environment({}) == KvRouterSettings()
    blank = {item.spec.env: " " for item in options_of(RouterConfig) if item.spec.env}
    assert settings_from_environment(blank | {"DYN_USE_KV_EVENTS": ""}) == KvRouterSettings()


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"DYN_ROUTER_TEMPERATURE": "abc"}, "DYN_ROUTER_TEMPERATURE=abc: expected a number"),
        ({"DYN_ROUTER_TEMPERATURE": "-1"}, "DYN_ROUTER_TEMPERATURE=-1: must be between 0 and"),
        ({"DYN_ROUTER_USE_KV_EVENTS": "maybe"}, "DYN_ROUTER_USE_KV_EVENTS=maybe: expected one of true/false"),
        ({"DYN_ROUTER_QUEUE_POLICY": "FCFS"}, "DYN_ROUTER_QUEUE_POLICY=FCFS: expected one of fcfs, lcfs, wspt"),
        ({"DYN_SHARED_CACHE_TYPE": "hicache"}, "DYN_SHARED_CACHE_TYPE=hicache is not available in this version"),
        ({"DYN_ROUTER_TRACKING_HASH": "keyed-xxh3-v1"}, "keyed-xxh3-v1 requires router_tracking_key_file"),
        (
            {"DYN_ROUTER_TRACK_OUTPUT_BLOCKS": "1", "DYN_ROUTER_TRACK_ACTIVE_BLOCKS": "0"},
            "router_track_output_blocks requires router_track_active_blocks=true",
        ),
        (
            {"DYN_ROUTER_POLICY_CONFIG": "/nope.yaml"},
            "router_policy_config: failed to read router policy config /nope.yaml: No such file or directory",
        ),
    ],
)
def test_a_wrong_variable_is_refused_and_named(env: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_from_environment(env)
    assert str(caught.value).startswith(text)


def test_an_old_name_counts_only_where_the_new_one_is_not_set() -> None:
    assert with_new_names({"DYN_USE_KV_EVENTS": "0", "OTHER": "x"})["DYN_ROUTER_USE_KV_EVENTS"] == "0"
    assert (
        with_new_names({"DYN_USE_KV_EVENTS": "0", "DYN_ROUTER_USE_KV_EVENTS": " "})["DYN_ROUTER_USE_KV_EVENTS"] == "0"
    )
    assert with_new_names({"DYN_USE_KV_EVENTS": "", "OTHER": "x"}) == {"DYN_USE_KV_EVENTS": "", "OTHER": "x"}


def options(*arguments: str) -> RouterConfig:
    parser = argparse.ArgumentParser()
    add_flags(parser, RouterConfig)
    return load(RouterConfig, parser.parse_args(arguments), {})


def test_flags_make_settings() -> None:
    settings = settings_of(
        options("--no-router-kv-events", "--router-approximate-cache-policy", "lru", "--router-queue-threshold", "2")
    )
    expected = replace(
        KvRouterSettings(), use_kv_events=False, router_approximate_cache_policy="lru", router_queue_threshold=2.0
    )
    assert settings == expected


def test_the_policy_file_is_read_and_its_router_section_wins(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("router: {use_kv_events: false, router_ttl_secs: 9}\n")
    settings = settings_of(options("--router-policy-config", str(path), "--router-ttl-secs", "5"))
    assert (settings.use_kv_events, settings.router_ttl_secs) == (False, 9.0)
    assert settings.policy is not None


def test_conditional_disaggregation_may_be_one_object() -> None:
    text = '{"policy": "prefill_load", "eff_isl_threshold": 5, "prefill_busy_threshold": 1.5}'
    arguments = ["--router-conditional-disagg", "--router-conditional-disagg-config", text]
    settings = settings_of(options(*arguments, "--router-conditional-disagg-eff-isl-threshold", "7"))
    assert settings == replace(
        KvRouterSettings(),
        conditional_disagg_enabled=True,
        conditional_disagg_policy="prefill_load",
        conditional_disagg_eff_isl_threshold=5,
        conditional_disagg_prefill_busy_threshold=1.5,
    )
    with pytest.raises(ConfigError, match="--router-conditional-disagg-config requires --router-conditional-disagg"):
        settings_of(options(*arguments[1:]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x", "--router-conditional-disagg-config=x: expected a JSON object"),
        ("[]", "--router-conditional-disagg-config=[]: expected a JSON object"),
        ('{"bogus": 1}', "must be a JSON object of its fields: Object contains unknown field `bogus`"),
        ('{"eff_isl_threshold": -1}', "must be a JSON object of its fields: Expected `int` >= 0"),
        ('{"policy": "x"}', "unknown conditional_disagg_policy"),
        ('{"policy": "prefill_load"}', "needs prefill_busy_threshold"),
    ],
)
def test_a_wrong_object_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(options("--router-conditional-disagg", "--router-conditional-disagg-config", text))
    assert expected in str(caught.value)

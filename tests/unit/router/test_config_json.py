"""The JSON form of ``KvRouterConfig``; texts as ai-dynamo-runtime 1.5.1 gives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_es.router.config import KvRouterConfig

PREFIX = "Failed to parse KvRouterConfig JSON: "


def refusal(text: str) -> str:
    with pytest.raises(ValueError) as caught:
        KvRouterConfig.from_json(text)
    message = str(caught.value)
    assert message.startswith(PREFIX)
    return message.removeprefix(PREFIX)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"router_event_threads": 1.0}', "invalid type: floating point `1.0`, expected u32 at line 1 column 28"),
        ('{"router_event_threads": -1}', "invalid value: integer `-1`, expected u32 at line 1 column 27"),
        ('{"overlap_score_credit": []}', "invalid type: sequence, expected f64 at line 1 column 25"),
        ('{"overlap_score_credit": null}', "invalid type: null, expected f64 at line 1 column 29"),
        ('{"overlap_score_credit": "a\\"b\\n"}', 'invalid type: string "a\\"b\\n", expected f64 at line 1 column 33'),
        ('\n{\n  "use_kv_events": 5\n}', "invalid type: integer `5`, expected a boolean at line 3 column 20"),
        ('{"use_kv_events": "é"}', 'invalid type: string "é", expected a boolean at line 1 column 22'),
        ('{"router_queue_policy": 5}', "expected value at line 1 column 25"),
        (
            '{"router_tracking_hash": "x"}',
            "unknown variant `x`, expected `public-xxh3-v1` or `keyed-xxh3-v1` at line 1 column 28",
        ),
        ('{"router_policy_config": 5}', "invalid type: integer `5`, expected a string at line 1 column 26"),
        ('{"router_tracking_key_file": 5}', "invalid type: integer `5`, expected path string at line 1 column 30"),
        ('{"use_kv_events": true, "use_kv_events": true}', "duplicate field `use_kv_events` at line 1 column 39"),
        ('{"use_kv_events": true,}', "trailing comma at line 1 column 24"),
        ("{} x", "trailing characters at line 1 column 4"),
        ('["x"]', 'invalid type: string "x", expected f64 at line 1 column 4'),
        ("[", "EOF while parsing a list at line 1 column 1"),
        ('{"durable_kv_events": true}', "durable_kv_events=true is not supported by this runtime"),
        ('{"use_remote_indexer":true,"serve_indexer":true}', "use_remote_indexer and serve_indexer are mutually "
         "exclusive"),
        (
            '{"router_policy_config": "/nope"}',
            "router_policy_config: failed to read router policy config /nope: No such file or directory (os error 2)",
        ),
    ],
)  # fmt: skip
def test_refusals_are_those_of_dynamo(text: str, expected: str) -> None:
    assert refusal(text) == expected


def test_the_text_must_be_text() -> None:
    with pytest.raises(TypeError, match="argument 'config_json': 'bytes' object cannot be converted to 'PyString'"):
        KvRouterConfig.from_json(b"{}")  # type: ignore[arg-type]


def test_every_member_reaches_the_settings() -> None:
    settings = KvRouterConfig.from_json(
        """{"overlap_score_credit": 2, "overlap_score_credit_decay": 0.5, "prefill_load_scale": 1e0,
        "decode_active_request_weight": 3, "host_cache_hit_weight": 0.5, "router_temperature": 0.25,
        "use_kv_events": true, "router_replica_sync": true, "router_ttl_secs": 1.5, "router_queue_threshold": 4,
        "router_event_threads": 8, "router_queue_policy": "lcfs", "shared_cache_type": "hicache",
        "router_predicted_ttl_secs": 5, "conditional_disagg_eff_isl_threshold": 18446744073709551615}"""
    ).settings
    assert (settings.overlap_score_credit, settings.prefill_load_scale) == (2.0, 1.0)
    assert (settings.router_queue_threshold, settings.router_queue_policy) == (4.0, "lcfs")
    assert (settings.router_event_threads, settings.shared_cache_type) == (8, "hicache")
    assert settings.conditional_disagg_eff_isl_threshold == 2**64 - 1


def test_members_may_stand_in_a_list_in_their_order() -> None:
    settings = KvRouterConfig.from_json("[2, 0, 3, 0, null, 0.5, 0.125, 0.1, false]").settings
    assert (settings.overlap_score_credit, settings.prefill_load_scale) == (2.0, 3.0)
    assert (settings.disk_cache_hit_weight, settings.use_kv_events) == (0.125, False)


def test_members_of_former_transports_are_ignored() -> None:
    text = """{"durable_kv_events": false, "router_snapshot_threshold": 5, "router_reset_states": true,
        "skip_initial_worker_wait": true}"""
    assert KvRouterConfig.from_json(text).settings == KvRouterConfig().settings


def test_a_policy_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("worker_selection: {aggregated: default}\n")
    config = KvRouterConfig.from_json(f'{{"router_policy_config": "{path}"}}')
    assert config.settings.policy is not None

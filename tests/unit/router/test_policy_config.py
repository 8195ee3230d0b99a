"""Policy documents where no recording speaks: what they give, and how they are bounded."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from dynamo_es.router.config import KvRouterConfig
from dynamo_es.router.policy_config import (
    CacheBucket,
    PolicyClass,
    PolicyConfig,
    PolicyProfile,
    WorkerSelection,
    WorkerSelectorInstance,
)
from dynamo_es.router.policy_config_file import MAX_BYTES, read_policy_config
from dynamo_es.router.policy_config_nodes import MAX_DEPTH, MAX_VALUES, DocumentRefusal
from dynamo_es.router.policy_config_rules import PolicyRefusal
from dynamo_es.router.policy_config_yaml import parse_policy_config

ROOT = """\
default_policy_family: std
uncached_isl_buckets: [{min_tokens: 0, bucket: all}]
policy_classes:
  - {name: a, policy_family: std, cache_bucket: all, quantum: 8}
"""


def refusal(text: str) -> str:
    with pytest.raises((DocumentRefusal, PolicyRefusal)) as caught:
        parse_policy_config(text)
    return str(caught.value)


def class_with(field: str) -> PolicyClass:
    profile = parse_policy_config(ROOT.replace("quantum: 8}", f"quantum: 8, {field}}}")).root
    assert profile is not None
    return profile.classes[0]


def test_a_whole_document() -> None:
    config = parse_policy_config(
        textwrap.dedent("""\
        default_policy_family: std
        uncached_isl_buckets: [{min_tokens: 0, bucket: small}, {min_tokens: 64, bucket: big}]
        policy_classes:
          - {name: std-small, policy_family: std, cache_bucket: small, quantum: 8, queue_policy: wspt,
             prefill_busy_threshold: 0, prefill_busy_threshold_frac: 1.5,
             request_queue_limit_per_worker: 1, raw_isl_token_queue_limit_per_worker: 12,
             cached_token_queue_limit_per_worker: 4}
          - {name: std-big, policy_family: std, cache_bucket: big, quantum: 16}
          - {name: express, quantum: 1}
        models:
          m2:
            default_policy_family: f
            uncached_isl_buckets: [{min_tokens: 0, bucket: b}]
            policy_classes: [{name: c, policy_family: f, cache_bucket: b, quantum: 2}]
        worker_selection:
          aggregated: default
          decode: mine
          instances: [{name: mine, type: kind, parameters: {list: [1, x, ~], on: no}}]
        """)
    )
    root = PolicyProfile(
        "std",
        (CacheBucket(0, "small"), CacheBucket(64, "big")),
        (
            PolicyClass("std-small", "std", "small", 8, "wspt", 0, 1.5, 1, 12, 4),
            PolicyClass("std-big", "std", "big", 16),
            PolicyClass("express", None, None, 1),
        ),
    )
    other = PolicyProfile("f", (CacheBucket(0, "b"),), (PolicyClass("c", "f", "b", 2),))
    instance = WorkerSelectorInstance("mine", "kind", {"list": [1, "x", None], "on": "no"})
    selection = WorkerSelection(aggregated="default", decode="mine", instances=(instance,))
    assert config == PolicyConfig(root, {"m2": other}, selection)
    assert [item.is_explicit for item in root.classes] == [False, False, True]
    assert config.profile_for("m2") == other
    assert config.profile_for("m1") == root


def test_a_model_without_a_profile_has_none_unless_there_is_a_root() -> None:
    text = "models:\n  m1:\n" + textwrap.indent(ROOT, "    ")
    config = parse_policy_config(text)
    assert config.profile_for("m1") is not None
    assert config.profile_for("m2") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [("0x10", 16), ("0o17", 15), ("0b11", 3), ("+5", 5), ("~", None), ("18446744073709551615", 2**64 - 1)],
)
def test_integers_are_those_of_yaml_1_2(text: str, value: int | None) -> None:
    assert class_with(f"request_queue_limit_per_worker: {text}").request_queue_limit_per_worker == value


@pytest.mark.parametrize("text", ["017", "1_000", "yes", "'1'", "1e3", "1:30", "2020-01-01", "true", "[1]", "{a: 1}"])
def test_what_only_looks_like_an_integer_is_none(text: str) -> None:
    with pytest.raises(DocumentRefusal, match=r"request_queue_limit_per_worker: invalid type: .*, expected usize at"):
        class_with(f"request_queue_limit_per_worker: {text}")


def test_names_are_text_however_they_look() -> None:
    for name in ("no", "on", "1", "1.5", "2020-01-01", "0x1"):
        config = parse_policy_config(ROOT.replace("std", name))
        assert config.root is not None
        assert config.root.default_policy_family == name


def test_numbers_that_are_none_are_refused() -> None:
    for text in (".nan", ".inf", "-.inf", "-1"):
        assert "must be finite and non-negative" in refusal(
            ROOT.replace("quantum: 8}", f"quantum: 8, prefill_busy_threshold_frac: {text}}}")
        )
    assert class_with("prefill_busy_threshold_frac: 1").prefill_busy_threshold_frac == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("models: {m: {default_policy_family: a}}", "models.m: missing field `policy_classes` at line 1 column 13"),
        ("uncached_isl_buckets: [{min_tokens: 0, bucket: a, z: 1}]", "uncached_isl_buckets[0]: unknown field `z`, "
         "expected `min_tokens` or `bucket` at line 1 column 51"),
        (ROOT + "default_policy_family: std\n", "duplicate field `default_policy_family`"),
        (ROOT + "models: {m: {}, m: {}}\n", "models.m: missing field `default_policy_family` at line 5 column 13"),
        ("worker_selection: {instances: [{name: a, type: b, parameters: 5}]}", 'worker_selection instance "a" '
         "parameters must be a YAML mapping"),
        ("worker_selection: {instances: [{name: default, type: b}]}", "worker_selection instance name 'default' is "
         "reserved for Dynamo's built-in selector"),
        ("worker_selection: {instances: [{name: a, type: b}, {name: a, type: c}]}", "worker_selection contains "
         'duplicate instance "a"'),
        ('default_policy_family: "a\\nb\\x01\\u2028\'"\nuncached_isl_buckets: []\npolicy_classes: []',
         'root policy family name "a\\nb\\u{1}\\u{2028}\'" must match [A-Za-z0-9_.-]+'),
        ("policy_classes: é", 'policy_classes: invalid type: string "é", expected a sequence at line 1 column 17'),
        ("? [a]\n: b\n", "invalid type: sequence, expected field identifier at line 1 column 3"),
        ("router: {bogus: 1}", "unknown router setting: bogus"),
        ("router: {use_kv_events: 1}", "router.use_kv_events: invalid type: integer `1`, expected a boolean at line 1 "
         "column 25"),
    ],
)  # fmt: skip
def test_refusals_say_what_and_where(text: str, expected: str) -> None:
    assert refusal(text) == expected


def test_a_name_that_stands_twice_is_refused_rather_than_half_used() -> None:
    profile = "{default_policy_family: a, policy_classes: [], uncached_isl_buckets: []}"
    assert refusal(f"models: {{m: {profile}, m: {profile}}}").startswith("models: duplicate entry `m` at")


def test_tags_name_nothing() -> None:
    config = parse_policy_config(ROOT.replace("family: std", "family: !!python/object:os.system std", 1))
    assert config.root is not None
    assert config.root.default_policy_family == "std"


def test_an_alias_is_what_it_stands_for() -> None:
    config = parse_policy_config("models:\n  a: &profile\n" + textwrap.indent(ROOT, "    ") + "  b: *profile\n")
    assert config.models["a"] == config.models["b"]


def test_documents_cannot_grow_by_aliases() -> None:
    classes = ", ".join(["{name: a, quantum: 1}"] * 3000)
    profile = f"{{default_policy_family: f, uncached_isl_buckets: [], policy_classes: [{classes}]}}"
    many = "".join(f"  m{number}: *p\n" for number in range(3000))
    assert f"more than {MAX_VALUES} values, with aliases expanded" in refusal(f"models:\n  m: &p {profile}\n{many}")


def test_a_collection_that_holds_itself_ends() -> None:
    text = "worker_selection: {instances: [{name: a, type: b, parameters: &x {y: *x}}]}"
    assert f"nested deeper than {MAX_DEPTH} levels" in refusal(text)


def test_nesting_is_bounded_before_anything_else() -> None:
    assert f"nested deeper than {MAX_DEPTH} levels" in refusal("[" * 100_000)


@pytest.mark.parametrize("text", ["a: 'x", "{", "*a", "a: b: c", "\t a", "--- 1\n--- 2\n", "a: \x00"])
def test_what_is_no_yaml_is_refused(text: str) -> None:
    assert refusal(text)


def test_the_router_section_wins_over_arguments(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("router: {use_kv_events: false, router_event_threads: 2, router_predicted_ttl_secs: ~}\n")
    settings = KvRouterConfig(router_policy_config=str(path), router_event_threads=8).settings
    assert (settings.use_kv_events, settings.router_event_threads) == (False, 2)
    path.write_text("router: {router_event_threads: 0}\n")
    with pytest.raises(ValueError, match=r"^router_policy_config: router_event_threads must be at least 1$"):
        KvRouterConfig(router_policy_config=str(path))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    failures = {
        str(tmp_path): "Is a directory (os error 21)",
        str(tmp_path / "none"): "No such file or directory (os error 2)",
        f"{path}\0": "file name contained an unexpected NUL byte",
        str(path): "stream did not contain valid UTF-8",
    }
    path.write_bytes(b"\xff\xfe\x00a")
    for name, reason in failures.items():
        with pytest.raises(ValueError) as caught:
            read_policy_config(name)
        assert str(caught.value) == f"failed to read router policy config {name}: {reason}"


def test_a_file_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(ROOT + "#" * (MAX_BYTES - len(ROOT)))
    assert read_policy_config(str(path)).root is not None
    path.write_text(ROOT + "#" * (MAX_BYTES - len(ROOT) + 1))
    with pytest.raises(ValueError, match=f"it is larger than {MAX_BYTES} bytes"):
        read_policy_config(str(path))


def test_infinity_is_no_integer() -> None:
    assert "floating point `inf`, expected usize" in refusal("uncached_isl_buckets: [{min_tokens: .inf, bucket: a}]")

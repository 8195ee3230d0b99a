"""``MockEngineArgs`` against what Dynamo's recorded: defaults, refused values, JSON."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dynamo_es.engines.mock.args import MockEngineArgs, ReasoningConfig, SglangArgs, TrtllmArgs, parse_reasoning
from dynamo_es.errors import ConfigError

GOLDEN = Path(__file__).parents[2] / "data/golden/services"
DEFAULTS = json.loads((GOLDEN / "mock_engine_args_defaults.json").read_text())["defaults"]
CASES = json.loads((GOLDEN / "mock_engine_args_validation.json").read_text())["cases"]


def call(case: dict[str, Any]) -> Any:
    if "kwargs" in case:
        return MockEngineArgs(**ast.literal_eval(case["kwargs"]))
    if "engine_type/block_size" in case:
        engine_type, block_size = case["engine_type/block_size"].split("/")
        return MockEngineArgs(engine_type=engine_type, block_size=int(block_size)).block_size
    text, _, attribute = case["json"].partition(" .")
    args = MockEngineArgs.from_json(text)
    return getattr(args, attribute) if attribute else args


def comparable(text: str) -> tuple[str, frozenset[str]]:
    """Without the parser's line and column, and with the bounds of a range in no order."""
    text = re.sub(r" at line \d+ column \d+$", "", text)
    bounds = re.search(r"range \[\{(.*)\}\]", text)
    return re.sub(r"range \[.*", "range", text), frozenset(bounds[1].split(", ") if bounds else ())


@pytest.mark.parametrize(("name", "value"), DEFAULTS.items())
def test_defaults_are_the_recorded_ones(name: str, value: str) -> None:
    assert repr(getattr(MockEngineArgs(), name)) == value


@pytest.mark.parametrize("case", CASES, ids=[case["case"] for case in CASES])
def test_values_are_taken_and_refused_as_recorded(case: dict[str, Any]) -> None:
    expected = case["result"]
    if "ok" in expected:
        found = call(case)
        assert isinstance(found, MockEngineArgs) or repr(found) == expected["ok"]
        return
    kind = OverflowError if expected["err"] == "OverflowError" else ConfigError
    with pytest.raises(kind) as error:
        call(case)
    assert comparable(str(error.value)) == comparable(expected["msg"])


@pytest.mark.parametrize(
    ("arguments", "block_size"),
    [({}, 64), ({"engine_type": "sglang"}, 1), ({"engine_type": "trtllm"}, 32),
     ({"engine_type": "sglang", "sglang": SglangArgs(page_size=4)}, 4), ({"sglang": SglangArgs(page_size=4)}, 64)],
)  # fmt: skip
def test_the_block_size_is_the_engines(arguments: dict[str, Any], block_size: int) -> None:
    assert MockEngineArgs(**arguments).engine_config().block_size == block_size


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"trtllm": TrtllmArgs("max_utilization")}, "supports only capacity_scheduler_policy='guaranteed_no_evict'"),
        ({"engine_type": "sglang", "block_size": 8, "sglang": SglangArgs(page_size=4)}, "sglang.page_size to match"),
        ({"aic_nextn_accept_rates": "a"}, "requires aic_nextn"),
        ({"aic_nextn_accept_rates": "a", "aic_nextn": 1}, 'value "a": invalid float literal'),
        ({"aic_nextn_accept_rates": "2.0", "aic_nextn": 1}, r"\[0\] must be finite and in \[0, 1\], got 2"),
        ({"speedup_ratio": float("nan")}, "speedup_ratio: it must be a number"),
    ],
)
def test_what_does_not_fit_together_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        MockEngineArgs(**arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"engine_type": "sglang", "sglang": SglangArgs(schedule_policy="x")}, "schedule_policy"),
        ({"reasoning": ReasoningConfig(1, 2, 1.5)}, "ratio"),
    ],
)
def test_the_engine_refuses_what_dynamo_does_not_look_at(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        MockEngineArgs(**arguments).engine_config()


def test_json_has_nested_settings_and_earlier_names() -> None:
    args = MockEngineArgs.from_json(
        '{"engine_type": "sglang", "sglang": {"page_size": 4, "schedule_policy": "lpm"}, "is_decode": true,'
        ' "kv_transfer_bytes_per_token": 5, "max_num_seqs": null, "dp_size": null,'
        ' "reasoning": {"start_thinking_token_id": 1, "end_thinking_token_id": 2, "thinking_ratio": 0.5}}'
    )
    config = args.engine_config()
    assert (config.block_size, config.sglang.schedule_policy, config.worker_type) == (4, "lpm", "decode")
    assert (args.kv_bytes_per_token, config.max_num_seqs, config.dp_size) == (5, None, 1)
    assert config.reasoning is not None
    for text, problem in (
        ('{"is_prefill": true, "is_decode": true}', "cannot both be true"),
        ('{"reasoning": {"start_thinking_token_id": 1}}', "missing field `end_thinking_token_id`"),
        ("x", "Failed to parse"),
        ("1", "invalid type: integer `1`"),
        ('{"num_gpu_blocks": -1}', "invalid value: integer `-1`, expected usize"),
        ('{"timing_model": {}}', "not in this version"),
    ):
        with pytest.raises(ConfigError, match=problem):
            MockEngineArgs.from_json(text)


def test_copies_stand_on_their_own() -> None:
    args = MockEngineArgs(num_gpu_blocks=5)
    other = args.copy()
    other.num_gpu_blocks = 9
    assert (args.num_gpu_blocks, other.num_gpu_blocks) == (5, 9)
    assert args.with_overrides(bootstrap_port=7).bootstrap_port == 7
    with pytest.raises(AttributeError, match="not writable"):
        args.block_size = 3
    assert (args.is_prefill(), args.is_decode()) == (False, False)


def test_reasoning_of_a_command_line() -> None:
    text = '{"start_thinking_token_id": 1, "end_thinking_token_id": 2, "thinking_ratio": 0.5}'
    assert parse_reasoning(text).thinking_ratio == 0.5
    for bad in ("x", "[]", "{}"):
        with pytest.raises(ConfigError):
            parse_reasoning(bad)

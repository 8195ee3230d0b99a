"""Times of AIC in the mock engine: against a stand-in for its model, and against the real one where it is installed."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from dynamo_es.engines.mock.aic_timing import AicTiming
from dynamo_es.engines.mock.args import MockEngineArgs
from dynamo_es.engines.mock.files import load_timing
from dynamo_es.engines.mock.timing import DefaultTiming
from dynamo_es.errors import ConfigError

MODEL = "Qwen/Qwen3-32B"


class ScriptedEngine:
    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float:
        self.asked.append(("prefill", bs, isl, prefix))
        if isl > 1000:
            raise ValueError("out of the table")
        return 2.0 * bs * (isl - prefix)

    def predict_decode_latency(self, bs: int, isl: int, osl: int = 2) -> float:
        self.asked.append(("decode", bs, isl, osl))
        if bs > 100:
            raise RuntimeError("no such batch")
        return float(bs * (osl - 1))


def test_a_pass_is_asked_for_with_the_mean_of_its_requests() -> None:
    engine = ScriptedEngine()
    timing = AicTiming(engine)
    assert timing.prefill_ms([100, 50], [10, 30]) == 2.0 * 2 * 20
    assert timing.decode_ms(1000, 3, 10**6) == 3.0
    assert engine.asked == [("prefill", 2, 95, 75), ("decode", 3, 333, 2)]


def test_a_pass_without_requests_takes_no_time_and_is_not_asked_for() -> None:
    engine = ScriptedEngine()
    timing = AicTiming(engine)
    assert (timing.prefill_ms([], []), timing.decode_ms(0, 0, 10)) == (0.0, 0.0)
    assert engine.asked == []


def test_what_the_model_cannot_answer_takes_as_long_as_before_and_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    timing = AicTiming(ScriptedEngine())
    assert [timing.prefill_ms([0], [tokens]) for tokens in (10, 5000, 6000)] == [20.0, 20.0, 20.0]
    assert [timing.decode_ms(200, requests, 10**6) for requests in (2, 200)] == [2.0, 2.0]
    assert timing.failures == 3
    assert caplog.text.count("AIC predicts no time") == 1


def test_the_deployment_is_the_workers_own_model_unless_another_is_named() -> None:
    config = MockEngineArgs(aic_backend="vllm").aic_config("dir/model")
    assert config is not None
    given = {name: value for name, value in config.values().items() if value is not None}
    assert given == {
        "aic_backend": "vllm", "aic_system": "h200_sxm", "aic_model_path": "dir/model", "aic_tp_size": 1
    }  # fmt: skip
    other = {"aic_system": "b200", "aic_model_path": MODEL, "aic_tp_size": 4, "aic_gemm_dtype": "fp8"}
    config = MockEngineArgs(aic_backend="vllm", **other).aic_config("dir/model")
    assert config is not None
    assert other.items() <= dict(config.values()).items()
    assert MockEngineArgs().aic_config("m") is None
    assert load_timing(MockEngineArgs(), "m") is None


def test_times_come_from_one_source() -> None:
    both = MockEngineArgs(aic_backend="vllm", planner_profile_data="times.npz")
    with pytest.raises(ConfigError, match="leave one of them out"):
        load_timing(both, MODEL)


def test_aic_that_is_not_there_is_an_error_and_never_the_polynomials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk", None)
    with pytest.raises(
        ConfigError, match=r"Failed to create AIC callback .*need the extra aic: pip install 'dynamo-es"
    ):
        load_timing(MockEngineArgs(aic_backend="vllm"), MODEL)
    with pytest.raises(ConfigError, match=r"Failed to create AIC callback .*aic_backend must be non-empty"):
        load_timing(MockEngineArgs(aic_backend=""), MODEL)


class TestInstalled:
    """With the package itself, offline."""

    @pytest.fixture(autouse=True)
    def _needs_the_package(self) -> None:
        pytest.importorskip("aiconfigurator_core", reason="the extra aic is not installed")

    def test_times_grow_with_the_work(self) -> None:
        timing = load_timing(MockEngineArgs(aic_backend="vllm", aic_tp_size=2), MODEL)
        assert timing is not None
        assert 0 < timing.prefill_ms([0], [128]) < timing.prefill_ms([0, 0], [4096, 4096])
        assert 0 < timing.decode_ms(1000, 1, 10**6) < timing.decode_ms(128_000, 64, 10**6)
        assert timing.prefill_ms([0], [4096]) != DefaultTiming().prefill_ms([0], [4096])

    def test_a_deployment_that_it_does_not_know_is_an_error_at_once(self) -> None:
        with pytest.raises(ConfigError, match=r"Failed to create AIC callback .*AIC has no performance model for"):
            load_timing(MockEngineArgs(aic_backend="vllm", aic_system="abacus"), MODEL)

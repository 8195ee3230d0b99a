"""AIC's prefill times: against a stand-in for its engine, and against the real package where it is installed."""

from __future__ import annotations

import sys

import pytest

from dynamo_es.errors import ConfigError
from dynamo_es.router.aic_model import AicPrefillTimes, _check_accept_rates, _engine_arguments, load_aic_times
from dynamo_es.router.config_aic import AicPerfConfig


class ScriptedEngine:
    """Answers 2 ms a token; knows no prompts of more than 1,000."""

    def __init__(self):
        self.asked = []

    def predict_prefill_latency(self, bs, isl, prefix=0):
        self.asked.append((bs, isl, prefix))
        if isl > 1000:
            raise ValueError("out of the table")
        return 2.0 * (isl - prefix)


def test_the_model_is_asked_for_the_whole_length_with_its_cached_part():
    engine = ScriptedEngine()
    assert AicPrefillTimes(engine).predict_s(100, 28) == pytest.approx(0.2)
    assert AicPrefillTimes(engine).predict_s(10, batch=3) == pytest.approx(0.02)
    assert engine.asked == [(1, 128, 28), (3, 10, 0)]


def test_nothing_to_compute_and_what_the_model_cannot_answer_have_no_time(caplog):
    times = AicPrefillTimes(ScriptedEngine())
    assert times.predict_s(0, 64) is None
    assert [times.predict_s(5000), times.predict_s(6000)] == [None, None]
    assert times.failures == 2
    assert caplog.text.count("out of the table") == 1


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk", None)
    with pytest.raises(ConfigError, match=r"need the extra aic: pip install 'dynamo-es\[aic\]'"):
        load_aic_times(AicPerfConfig("vllm", "h200_sxm", "Qwen/Qwen3-32B"))


FORMATS = {"GEMMQuantMode": ["bfloat16", "fp8", "int4_wo"], "KVCacheQuantMode": ["fp8"], "CommQuantMode": ["half"]}


def arguments(**options):
    values = AicPerfConfig("vllm", "h200_sxm", "m", **options).values()
    return _engine_arguments(values, lambda name: dict.fromkeys(FORMATS.get(name, [])))


def test_what_is_not_given_is_left_to_the_model():
    assert arguments() == {"tp_size": 1}
    assert arguments(aic_gemm_dtype="auto", aic_moe_dtype="none", aic_fmha_dtype="null", aic_comm_dtype="") == {
        "tp_size": 1
    }


def test_parallelism_drafts_and_formats_reach_the_model():
    assert arguments(
        aic_tp_size=2, aic_moe_tp_size=3, aic_moe_ep_size=4, aic_attention_dp_size=5, aic_nextn=2,
        aic_backend_version="current", aic_gemm_dtype="int4", aic_kv_cache_dtype="fp8",
    ) == {
        "tp_size": 2, "moe_tp_size": 3, "moe_ep_size": 4, "attention_dp_size": 5, "nextn": 2,
        "backend_version": "current", "gemm_quant_mode": "int4_wo", "kvcache_quant_mode": "fp8",
    }  # fmt: skip


def test_a_format_that_the_model_has_not_is_refused_with_those_that_it_has():
    with pytest.raises(ConfigError, match="unsupported AIC aic_gemm_dtype quant mode 'fp7'; use one of bfloat16, fp8"):
        arguments(aic_gemm_dtype="fp7")


@pytest.mark.parametrize(("text", "wrong"), [("a", '"a": invalid float'), ("0.5, 1.2", '"1.2": must be between')])
def test_accept_rates_are_numbers_of_0_to_1(text, wrong):
    with pytest.raises(ConfigError, match=wrong):
        _check_accept_rates(text)
    for good in (None, "", "0.5,0.25", "1,1,1,1,1,ignored"):
        _check_accept_rates(good)


class TestInstalled:
    """With the package itself, offline."""

    @pytest.fixture(autouse=True)
    def _needs_the_package(self):
        pytest.importorskip("aiconfigurator_core", reason="the extra aic is not installed")

    def test_times_grow_with_the_prompt_and_shrink_with_what_is_cached(self):
        times = load_aic_times(AicPerfConfig("vllm", "h200_sxm", "Qwen/Qwen3-32B", 2, aic_kv_cache_dtype="auto"))
        short, long = times.predict_s(512), times.predict_s(8192)
        assert 0 < short < long < 10
        assert times.predict_s(8192 - 4096, 4096) < long
        assert times.predict_s(0, 100) is None
        assert times.failures == 0

    @pytest.mark.parametrize(
        "deployment",
        [("vllm", "no-such-system", "Qwen/Qwen3-32B"), ("no-such-engine", "h200_sxm", "Qwen/Qwen3-32B")],
    )
    def test_a_deployment_that_it_does_not_know_is_an_error_at_once(self, deployment):
        with pytest.raises(ConfigError, match="AIC has no performance model for Qwen/Qwen3-32B"):
            load_aic_times(AicPerfConfig(*deployment))

    def test_ranks_that_do_not_fit_the_model_are_an_error_at_once(self):
        with pytest.raises(ConfigError, match="AIC has no performance model"):
            load_aic_times(AicPerfConfig("vllm", "h200_sxm", "Qwen/Qwen3-32B", 7))

    def test_a_version_that_it_does_not_know_is_an_error_at_once(self):
        with pytest.raises(ConfigError, match="AIC has no performance model"):
            load_aic_times(AicPerfConfig("vllm", "h200_sxm", "Qwen/Qwen3-32B", aic_backend_version="0.0.1"))

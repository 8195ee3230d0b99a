"""What vLLM is asked for a preprocessed request, and what its outputs become. vLLM itself is not needed here."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.engines.vllm_engine.translation import OutputReader, prompt_of, sampling_arguments
from dynamo_es.engines.vllm_engine.worker import VllmWorkerSettings, run_vllm_worker
from dynamo_es.errors import ConfigError, EngineShutdown, InvalidArgument
from dynamo_es.runtime.core import RuntimeSettings

REQUEST: dict[str, Any] = {
    "token_ids": [5, 6, 7],
    "stop_conditions": {"max_tokens": 100, "stop": ["x"], "stop_token_ids": [9], "stop_token_ids_hidden": [2],
                        "min_tokens": 1, "ignore_eos": None},
    "sampling_options": {"temperature": 0.5, "top_p": None, "n": 2, "logit_bias": {"4": 1.5},
                         "guided_decoding": {"regex": "a+", "backend": "auto"}},
    "output_options": {"logprobs": 1},
}  # fmt: skip


def output(*choices: dict[str, Any], finished: bool = False) -> Any:
    made = [
        SimpleNamespace(**{"index": 0, "token_ids": [], "finish_reason": None, "logprobs": None, **choice})
        for choice in choices
    ]
    return SimpleNamespace(outputs=made, finished=finished, num_cached_tokens=2)


def probability(rank: int, logprob: float) -> Any:
    return SimpleNamespace(rank=rank, logprob=logprob)


def test_what_is_set_beats_the_models_defaults_and_stop_strings_stay_here() -> None:
    arguments, guide = sampling_arguments(REQUEST, {"temperature": 0.2, "top_p": 0.9}, 50)
    assert arguments == {
        "temperature": 0.5, "top_p": 0.9, "n": 2, "logit_bias": {4: 1.5}, "min_tokens": 1, "stop_token_ids": [2, 9],
        "max_tokens": 47, "logprobs": 1,
    }  # fmt: skip
    assert guide == {"regex": "a+"}


def test_what_fits_is_asked_for_if_nothing_is() -> None:
    assert sampling_arguments({"token_ids": [1, 2]}, {}, 50) == ({"max_tokens": 48}, None)


@pytest.mark.parametrize("request_", [None, {}, {"token_ids": []}, {"token_ids": [[1]]}, {"token_ids": [1] * 50}])
def test_prompts_that_the_engine_cannot_have(request_: Any) -> None:
    with pytest.raises(InvalidArgument):
        prompt_of(request_, 50)


def test_outputs_are_frames() -> None:
    reader = OutputReader(REQUEST)
    # The chosen token is not the likeliest one, so vLLM gives both.
    row = {8: probability(2, -1.0), 4: probability(1, -0.5)}
    assert reader.read(output({"index": 1, "token_ids": [8], "logprobs": [row]})) == [
        {
            "token_ids": [8], "index": 1, "log_probs": [-1.0],
            "top_logprobs": [[{"rank": 1, "token_id": 4, "logprob": -0.5}]],
        }
    ]  # fmt: skip
    (frame,) = reader.read(output({"token_ids": [3], "finish_reason": "length"}, finished=True))
    assert frame == {
        "token_ids": [3], "index": 0, "finish_reason": "length",
        "completion_usage": {
            "prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }  # fmt: skip


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_end_that_nobody_asked_for_is_the_engines(reason: str) -> None:
    with pytest.raises(EngineShutdown):
        OutputReader(REQUEST).read(output({"finish_reason": reason}))


async def test_a_model_must_be_named() -> None:
    with pytest.raises(ConfigError, match="--model-path"):
        await run_vllm_worker(
            VllmWorkerSettings(RuntimeSettings()), asyncio.Event(), clock=SystemClock(), rng=random.Random(1)
        )

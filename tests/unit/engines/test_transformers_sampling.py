"""What requests ask of sampling, and what comes of it; with NumPy, without a model."""

from __future__ import annotations

import numpy as np
import pytest

from dynamo_es.engines.transformers_engine.limits import check_supported
from dynamo_es.engines.transformers_engine.sampler import Sampler
from dynamo_es.engines.transformers_engine.sampling_options import SamplingOptions, read_options
from dynamo_es.errors import InvalidArgument

LOGITS = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.05], np.float32))


def read(**request):
    return read_options(request, vocab_size=10, eos_token_ids=(2,))


def sampler(prompt=(), seed=0, **options):
    return Sampler(SamplingOptions(**options), prompt, np.random.default_rng(seed))


def drawn(count=2000, **options):
    """How often each token comes, each time as the first one."""
    rng = np.random.default_rng(5)
    chosen = [Sampler(SamplingOptions(**options), (), rng).choose(LOGITS).token_id for _ in range(count)]
    return np.bincount(chosen, minlength=5) / count


def test_what_is_not_said_is_neutral_or_the_models_own():
    assert read() == SamplingOptions(stop_ids=frozenset({2}))
    nothing = {"temperature": None, "top_p": None, "top_k": None, "min_p": None, "repetition_penalty": None}
    defaults = {"temperature": 0.2, "top_k": 20}
    request = {"sampling_options": nothing, "stop_conditions": {"min_tokens": None}}
    options = read_options(request, vocab_size=10, eos_token_ids=(), defaults=defaults)
    assert (options.temperature, options.top_k, options.top_p) == (0.2, 20, 1.0)
    request = {"sampling_options": {"temperature": 0.0, "top_k": -1}}
    options = read_options(request, vocab_size=10, eos_token_ids=(), defaults=defaults)
    assert (options.is_greedy, options.top_k, options.is_plain) == (True, 0, True)


def test_an_answer_ends_at_the_tokens_that_the_request_names_or_the_models_own():
    stop = {"stop_token_ids": [3], "stop_token_ids_hidden": [4]}
    assert read(stop_conditions=stop, eos_token_ids=[5]).stop_ids == {3, 4, 5}
    assert read(stop_conditions=stop).stop_ids == {2, 3, 4}
    assert read(stop_conditions={**stop, "ignore_eos": True}, eos_token_ids=[5]).stop_ids == {3}
    # A tokenizer may have tokens that its model does not.
    assert read(eos_token_ids=[5, 10]).stop_ids == {5}


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        ({"sampling_options": {"temperature": -0.1}}, "temperature must be between 0 and 100"),
        ({"sampling_options": {"temperature": float("nan")}}, "temperature"),
        ({"sampling_options": {"temperature": "hot"}}, "temperature"),
        ({"sampling_options": {"top_p": 0.0}}, "top_p must be over 0 and at most 1"),
        ({"sampling_options": {"top_k": -2}}, "top_k"),
        ({"sampling_options": {"top_k": True}}, "top_k"),
        ({"sampling_options": {"min_p": 1.5}}, "min_p"),
        ({"sampling_options": {"presence_penalty": 3}}, "presence_penalty"),
        ({"sampling_options": {"repetition_penalty": 0}}, "repetition_penalty"),
        ({"sampling_options": {"seed": 1.5}}, "seed"),
        ({"sampling_options": {"logit_bias": {"10": 1.0}}}, "logit_bias: '10' is no token id below 10"),
        ({"sampling_options": {"logit_bias": {"1": 101}}}, "logit_bias"),
        ({"sampling_options": {"logit_bias": [1]}}, "logit_bias"),
        ({"stop_conditions": {"stop_token_ids": [2**32]}}, "stop_token_ids: 4294967296"),
        ({"stop_conditions": {"min_tokens": -1}}, "min_tokens"),
        ({"eos_token_ids": "x"}, "eos_token_ids"),
        ({"output_options": {"logprobs": 21}}, "logprobs"),
        ({"extra_args": {"sampling_options": {"allowed_token_ids": [-1]}}}, "allowed_token_ids"),
        ({"extra_args": {"sampling_options": {"bad_words_token_ids": 3}}}, "bad_words_token_ids"),
    ],
)
def test_a_value_that_makes_no_sense_is_named(request_, named):
    with pytest.raises(InvalidArgument, match=named):
        read(**request_)


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        ({"sampling_options": {"guided_decoding": {"json": {}}}}, "guided_decoding.*does not guide"),
        ({"sampling_options": {"best_of": 3, "n": 2}}, "best_of"),
        ({"sampling_options": {"use_beam_search": True}}, "use_beam_search"),
        ({"output_options": {"prompt_logprobs": 0}}, "prompt_logprobs"),
        ({"extra_args": {"echo": True}}, "echo"),
        ({"stop_conditions": {"max_thinking_tokens": 5}}, "max_thinking_tokens"),
        ({"multi_modal_data": {"image_url": ["x"]}}, "multi_modal_data"),
    ],
)
def test_what_the_engine_does_not_do_is_refused_by_name(request_, named):
    with pytest.raises(InvalidArgument, match=named):
        check_supported(request_)


def test_without_temperature_the_most_probable_token_is_taken():
    greedy = sampler(temperature=0)
    assert [greedy.choose(LOGITS).token_id for _ in range(3)] == [0, 0, 0]


def test_tokens_come_as_often_as_the_model_says():
    assert drawn() == pytest.approx([0.4, 0.3, 0.15, 0.1, 0.05], abs=0.04)
    assert drawn(temperature=0.5) == pytest.approx(np.square([0.4, 0.3, 0.15, 0.1, 0.05]) / 0.285, abs=0.04)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.71}, {0, 1, 2}),
        ({"min_p": 0.3}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.5}, {0, 1}),
        ({"allowed": (3, 4)}, {3, 4}),
        ({"logit_bias": {4: 100.0}}, {4}),
        ({"bad_words": ((0,), (1,))}, {2, 3, 4}),
        ({"min_tokens": 1, "stop_ids": frozenset({0, 2})}, {1, 3, 4}),
        ({"temperature": 100.0, "top_k": 1}, {0}),
    ],
)
def test_what_is_left_to_choose_from(options, left):
    assert set(np.flatnonzero(drawn(500, **options))) == left


def test_a_bad_word_of_several_tokens_is_cut_at_its_last():
    greedy = sampler(temperature=0, bad_words=((0, 0),))
    assert [greedy.choose(LOGITS).token_id for _ in range(4)] == [0, 1, 0, 1]


def test_penalties_go_by_what_was_said():
    flat = np.array([1.0, 0.9, -0.5], np.float32)
    often = sampler(temperature=0, frequency_penalty=0.15)
    assert [often.choose(flat).token_id for _ in range(4)] == [0, 1, 0, 1]
    once = sampler(temperature=0, presence_penalty=0.3)
    assert [once.choose(flat).token_id for _ in range(3)] == [0, 1, 0]
    # The prompt counts too, and a negative logit is made smaller.
    repeated = sampler(prompt=[0, 2], temperature=0, repetition_penalty=2.0, logprobs=0)
    assert [repeated.choose(flat).token_id for _ in range(2)] == [1, 0]


def test_the_same_seed_gives_the_same_answer():
    def told(seed):
        one = sampler(seed=seed)
        return [one.choose(LOGITS).token_id for _ in range(20)]

    assert told(3) == told(3) != told(4)


def test_log_probabilities_are_the_models_own():
    one = sampler(temperature=0, logprobs=2, logit_bias={3: 50.0})
    choice = one.choose(LOGITS)
    assert choice.token_id == 3
    assert choice.logprob == pytest.approx(np.log(0.1), abs=1e-5)
    assert [token for token, _ in choice.top] == [0, 1, 3]
    assert [value for _, value in choice.top] == pytest.approx(np.log([0.4, 0.3, 0.1]), abs=1e-5)
    assert sampler(temperature=0, logprobs=0).choose(LOGITS).top == ()
    assert sampler(temperature=0).choose(LOGITS).logprob is None


def test_logits_that_allow_nothing_or_everything_still_give_a_token():
    nothing = np.full(4, -np.inf, np.float32)
    assert 0 <= sampler().choose(nothing).token_id < 4
    endless = np.array([0.0, np.inf, 0.0], np.float32)
    assert sampler().choose(endless).token_id == 1

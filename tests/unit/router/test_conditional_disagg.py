from __future__ import annotations

import pytest

from dynamo_es.router.conditional_disagg import ConditionalDisagg, RankState, conditional_disagg
from dynamo_es.router.config_settings import KvRouterSettings

IDLE = RankState(0, 100, 0, 50)
UNKNOWN = RankState(10_000, None, 10_000, None)


def settings(**options):
    return KvRouterSettings(**{f"conditional_disagg_{name}": value for name, value in options.items()})


def policy(name, queue_threshold=None, **options):
    values = settings(enabled=True, policy=name, **options)
    if queue_threshold is not None:
        values = KvRouterSettings(
            conditional_disagg_enabled=True, conditional_disagg_policy=name, router_queue_threshold=queue_threshold
        )
    found = conditional_disagg(values)
    assert found is not None
    return found


def test_it_is_off_by_default():
    assert conditional_disagg(KvRouterSettings()) is None
    assert conditional_disagg(settings(policy="isl_or_load", prefill_busy_threshold=1.0)) is None


@pytest.mark.parametrize(
    ("isl", "cached", "local"),
    [
        (1000, 896, True),  # 104 tokens are left, about a tenth
        (100_000, 64_000, False),  # too many are left
        (200, 0, False),  # few, but all of it
        (2048, 0, False),  # at the bound
        (2000, 600, False),  # exactly seven tenths
        (2000, 601, True),
        (100, 640, True),  # cached beyond its end
        (0, 0, True),
    ],
)
def test_isl_bounding_asks_for_few_tokens_and_a_small_part(isl, cached, local):
    assert policy("isl_bounding").keeps_local(isl, cached, IDLE, None) is local


def test_isl_bounding_does_not_look_at_the_prefill_rank():
    busy = RankState(1_000_000, 100, 0, 50)
    found = policy("isl_bounding", prefill_busy_threshold=1.0)
    assert not found.asks_prefill_load
    assert not found.keeps_local(10_000, 0, IDLE, busy)


@pytest.mark.parametrize(("tokens", "local"), [(0, False), (150, False), (151, True)])
def test_prefill_load_asks_for_more_than_the_threshold(tokens, local):
    found = policy("prefill_load", prefill_busy_threshold=1.5)
    assert found.asks_prefill_load
    assert found.keeps_local(10_000, 0, IDLE, RankState(tokens, 100, 0, 50)) is local
    assert not found.keeps_local(100, 99, IDLE, IDLE)  # short prompts are no reason


def test_prefill_load_takes_the_queues_threshold_if_it_has_none_of_its_own():
    found = policy("prefill_load", queue_threshold=2.0)
    assert not found.keeps_local(10_000, 0, IDLE, RankState(200, 100, 0, 50))
    assert found.keeps_local(10_000, 0, IDLE, RankState(201, 100, 0, 50))


@pytest.mark.parametrize("prefill", [None, UNKNOWN])
def test_a_prefill_rank_of_which_nothing_is_known_counts_as_free(prefill):
    assert not policy("prefill_load", prefill_busy_threshold=0.0).keeps_local(10_000, 0, IDLE, prefill)


@pytest.mark.parametrize(
    ("cached", "tokens", "local"), [(0, 0, False), (9_000, 0, True), (0, 101, True), (9_000, 101, True)]
)
def test_isl_or_load_is_either(cached, tokens, local):
    found = policy("isl_or_load", prefill_busy_threshold=1.0)
    assert found.keeps_local(10_000, cached, IDLE, RankState(tokens, 100, 0, 50)) is local


@pytest.mark.parametrize(("blocks", "local"), [(0, True), (40, True), (41, False)])
def test_a_busy_decode_rank_computes_no_prompts(blocks, local):
    found = policy("isl_or_load", prefill_busy_threshold=1.0, decode_busy_threshold=0.8)
    for cached, tokens in ((9_999, 0), (0, 101)):
        decode = RankState(0, 100, blocks, 50)
        assert found.keeps_local(10_000, cached, decode, RankState(tokens, 100, 0, 50)) is local


def test_a_decode_rank_of_unknown_size_computes_none_if_there_is_a_threshold():
    assert not policy("isl_bounding", decode_busy_threshold=0.8).keeps_local(1000, 990, UNKNOWN, None)
    assert policy("isl_bounding").keeps_local(1000, 990, UNKNOWN, None)


def test_limits_that_are_not_asked_never_keep_a_prompt():
    assert not ConditionalDisagg(None, None, None, None).keeps_local(10, 10, IDLE, None)

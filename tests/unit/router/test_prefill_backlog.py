"""Every branch of router-core D.1's ``aic`` model, and its examples."""

from __future__ import annotations

import itertools

import pytest

from dynamo_es.router.prefill_backlog import Prefill, PrefillBacklog


def backlog(*prefills):
    """Of (tokens, duration_s) or (tokens, duration_s, since); keys are their numbers."""
    result = PrefillBacklog()
    for key, values in enumerate(prefills):
        tokens, duration_s, *since = values
        result.add(key, Prefill(tokens, duration_s, since[0] if since else float(key)))
    return result


def test_an_idle_rank_has_nothing_to_compute():
    assert PrefillBacklog().tokens_at(5.0) == 0


@pytest.mark.parametrize(("at", "left"), [(0, 100), (2.5, 75), (5, 50), (9.99, 1), (10, 0), (500, 0), (-3, 100)])
def test_one_prompt_of_100_tokens_and_10_seconds(at, left):
    assert backlog((100, 10.0)).tokens_at(at) == left


def test_while_all_are_predicted_the_anchors_speed_is_taken_from_the_sum():
    both = backlog((100, 10.0), (60, 6.0))
    assert [both.tokens_at(at) for at in (0, 5, 10, 12, 16, 99)] == [160, 110, 60, 40, 0, 0]


def test_an_anchor_without_a_prediction_counts_in_full():
    assert backlog((100, None), (60, 6.0)).tokens_at(50) == 160
    assert backlog((100, None)).tokens_at(50) == 100


def test_if_another_one_is_not_predicted_only_the_anchor_falls_and_not_under_zero():
    mixed = backlog((100, 10.0), (60, None))
    assert [mixed.tokens_at(at) for at in (0, 5, 10, 12, 99)] == [160, 110, 60, 60, 60]


def test_what_is_left_of_the_anchor_is_rounded_up_then():
    assert backlog((10, 3.0), (5, None)).tokens_at(1.0) == 7 + 5


def test_an_anchor_that_takes_no_time_counts_nothing():
    assert backlog((100, 0.0), (60, 6.0)).tokens_at(0) == 60
    assert backlog((100, 0.0), (60, None)).tokens_at(0) == 60


def test_the_next_oldest_is_the_anchor_from_the_moment_the_first_is_done():
    both = backlog((100, 10.0), (60, 6.0))
    both.remove(0, now=20.0)
    assert [both.tokens_at(at) for at in (20, 23, 26, 99)] == [60, 30, 0, 0]


def test_one_that_is_not_the_anchor_leaves_the_time_alone():
    three = backlog((100, 10.0), (60, None), (40, 4.0))
    assert three.tokens_at(5) == 150
    three.remove(1, now=5.0)
    assert three.tokens_at(5) == 90  # all are predicted now
    three.remove(1, now=6.0)
    assert (len(three), three.tokens) == (2, 140)


def test_an_empty_backlog_starts_afresh():
    one = backlog((100, 10.0))
    one.remove(0, now=3.0)
    assert one.tokens_at(4.0) == 0
    one.add("later", Prefill(50, 5.0, 7.0))
    assert [one.tokens_at(at) for at in (7.0, 9.5)] == [50, 25]


def test_LOAD_06_the_order_in_which_prompts_are_heard_of_does_not_matter():
    prompts = [(0, Prefill(100, 10.0, 3.0)), (1, Prefill(60, 6.0, 1.0)), (2, Prefill(40, 4.0, 2.0))]
    for order in itertools.permutations(prompts):
        heard = PrefillBacklog()
        for key, prefill in order:
            heard.add(key, prefill)
        assert [heard.tokens_at(at) for at in (1.0, 4.0, 7.0)] == [200, 170, 140]

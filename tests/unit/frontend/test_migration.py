"""What a request is when another worker takes it over: pure, no workers."""

from __future__ import annotations

import pytest

from dynamo_es.errors import (
    Cancelled,
    CannotConnect,
    ConnectionTimeout,
    Disconnected,
    EngineShutdown,
    InvalidArgument,
    StreamIncomplete,
    Unknown,
)
from dynamo_es.frontend.migration import Migration, MigrationSettings, continued
from dynamo_es.runtime.errors import Overloaded

PROMPT = list(range(10))
REQUEST = {
    "token_ids": PROMPT,
    "stop_conditions": {"max_tokens": 8, "min_tokens": 5, "max_thinking_tokens": 2, "stop": ["END"]},
    "sampling_options": {"temperature": 0.5, "n": None},
    "output_options": {"logprobs": 1, "prompt_logprobs": 1},
    "routing": {"expected_output_tokens": 4, "cache_salt": "s"},
    "extra_args": {"echo": True, "suffix": "x"},
}
LOST = Disconnected("died")


class Observer:
    def __init__(self):
        self.lost, self.ends = [], []

    def worker_lost(self, kind):
        self.lost.append(kind)

    def migrated(self, kind, seconds, *, recovered):
        self.ends.append((kind, seconds, recovered))


class Times:
    now = 0.0

    def __call__(self):
        return self.now


def migration(request=None, limit=3, observer=None, now=None, **settings):
    return Migration(request or REQUEST, MigrationSettings(limit, **settings), observer, now or Times())


def tokens(*token_ids, finish=None, **more):
    return [{"token_ids": list(token_ids), "finish_reason": finish, **more}]


def test_the_next_worker_gets_the_output_behind_the_prompt_and_less_to_do():
    one = migration()
    assert one.begin() is REQUEST
    one.take(tokens(70, 71))
    one.take(tokens(72))
    assert one.resumes(LOST, 5, 1)
    following = one.begin()
    assert following["token_ids"] == [*PROMPT, 70, 71, 72]
    assert following["stop_conditions"] == {
        "max_tokens": 5, "min_tokens": 2, "max_thinking_tokens": 0, "stop": ["END"],
    }  # fmt: skip
    assert following["output_options"] == {"logprobs": 1, "prompt_logprobs": None}
    assert following["routing"] == {"expected_output_tokens": 1, "cache_salt": "s"}
    assert following["extra_args"] == {"suffix": "x"}
    assert following["sampling_options"] == REQUEST["sampling_options"]
    assert (one.excluded, one.last_attempt) == ({5}, 1)
    assert REQUEST["token_ids"] == PROMPT
    assert continued({"token_ids": [1]}, [2])["token_ids"] == [1, 2]


def test_PROTO_21_the_limit_counts_and_usage_is_of_the_request():
    one = migration(limit=2)
    one.begin()
    one.take(tokens(70, 71, 72))
    assert one.resumes(LOST, 1, 1)
    one.begin()
    one.take(tokens(73, 74))
    assert one.resumes(LOST, 2, 2)
    last = one.begin()
    assert (len(last["token_ids"]), last["stop_conditions"]["max_tokens"]) == (15, 3)
    usage = {"prompt_tokens": 15, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 14}}
    (frame,) = one.take(tokens(75, 76, 77, finish="length", completion_usage=usage))
    assert frame["completion_usage"]["prompt_tokens"] == 10
    assert frame["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 10}
    other = migration(limit=1)
    other.begin()
    other.take(tokens(70))
    assert other.resumes(LOST, 1, 1)
    other.begin()
    assert not other.resumes(LOST, 2, 2)


def test_both_hops_of_one_worker_pair_are_one_migration():
    one = migration(limit=1)
    one.begin()
    assert one.resumes(LOST, 1, 1)
    assert one.resumes(StreamIncomplete("cut"), 2, 4)
    assert (one.excluded, one.last_attempt) == ({1, 2}, 4)


@pytest.mark.parametrize(
    "error",
    [
        *(CannotConnect("x"), Disconnected("x"), EngineShutdown("x"), StreamIncomplete("x")),
        *(ConnectionTimeout("x"), Overloaded("x")),
    ],
)
def test_failures_of_a_worker_are_made_good(error):
    assert migration().resumes(error, 1, 1)


@pytest.mark.parametrize("error", [InvalidArgument("x"), Unknown("x"), Cancelled("x")])
def test_failures_of_the_request_are_not(error):
    assert not migration().resumes(error, 1, 1)


@pytest.mark.parametrize(
    "sampling", [{"guided_decoding": {"json": {"type": "object"}}}, {"n": 2}, {"n": 1, "best_of": 2}]
)
def test_PROTO_20_what_tokens_alone_do_not_continue_starts_over_or_fails(sampling):
    request = {**REQUEST, "sampling_options": sampling}
    one = migration(request)
    one.begin()
    one.take([{"token_ids": []}])
    assert one.resumes(LOST, 1, 1)
    assert one.begin() is request
    one.take(tokens(70))
    assert not one.resumes(LOST, 2, 2)


@pytest.mark.parametrize(
    "frame", [{"token_ids": [], "text": "seen"}, {"text": "seen"}, {"embedding": [1.0]}, {"token_ids": [1], "index": 1}]
)
def test_output_that_cannot_be_told_to_another_worker_is_not_lost_silently(frame):
    one = migration()
    one.begin()
    one.take([frame])
    assert not one.resumes(LOST, 1, 1)


def test_a_request_that_is_too_long_stays_where_it_is():
    one = migration(max_seq_len=11)
    one.begin()
    one.take(tokens(70))
    assert one.resumes(LOST, 1, 1)
    one.begin()
    one.take(tokens(71))
    assert not one.resumes(LOST, 2, 2)
    assert not migration(max_seq_len=9).resumes(LOST, 1, 1)


@pytest.mark.parametrize(
    ("settings", "output", "rest"),
    [
        ({}, tokens(*range(70, 78)), [{"token_ids": [], "finish_reason": "length"}]),
        ({"context_length": 12}, tokens(70, 71), [{"token_ids": [], "finish_reason": "length"}]),
        ({}, tokens(70, finish="stop"), []),
    ],
)
def test_a_request_that_has_all_it_wanted_needs_nobody(settings, output, rest):
    one = migration(**settings)
    one.begin()
    one.take(output)
    assert not one.resumes(LOST, 1, 1)
    assert one.is_over
    assert one.rest() == rest


def test_migrations_are_counted_and_timed():
    observer, times = Observer(), Times()
    one = migration(limit=2, observer=observer, now=times)
    one.begin()
    assert one.resumes(LOST, 1, 1)
    times.now = 2.0
    one.begin()
    one.take(tokens(70))
    assert one.resumes(LOST, 2, 2)
    times.now = 5.0
    one.end(LOST)
    assert observer.lost == ["new_request", "ongoing_request"]
    assert observer.ends == [("new_request", 2.0, True), ("ongoing_request", 3.0, False)]


def test_losses_are_counted_where_nothing_migrates():
    observer = Observer()
    one = migration(limit=0, observer=observer)
    one.begin()
    assert not one.resumes(LOST, 1, 1)
    one.end(LOST)
    migration(limit=0, observer=observer).end(InvalidArgument("x"))
    assert (observer.lost, observer.ends) == (["new_request"], [])

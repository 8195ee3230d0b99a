"""The short way of frames in the middle of a stream gives what the iteration gives."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dynamo_es.clock import ManualClock
from dynamo_es.frontend.contracts import ServedModel
from dynamo_es.frontend.errors import ApiError
from dynamo_es.frontend.generation import Generation
from dynamo_es.frontend.metrics import FrontendMetrics, RequestMeter
from dynamo_es.frontend.pipeline import Delta, OutputOptions, OutputPipeline
from dynamo_es.frontend.tokenizer import BytesTokenizer
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.lane import Lane
from tests.unit.frontend.fakes import card, frame

TEXT = "Grüße 😀, one two <|sep|> three, 漢字 and the rest of it."
STOP_ID = 10


class LanedEngine:
    """Offers each batch but the first to the lane before it yields it, as a stream does."""

    def __init__(self, batches: Sequence[list[Any]]) -> None:
        self._batches = batches
        self.laned = 0

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
        for batch in self._batches:
            yield batch

    async def generate_by(
        self, request: dict[str, Any], context: Context, lane: Lane
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        for place, batch in enumerate(self._batches):
            if place and lane.offer(batch):
                self.laned += 1
            else:
                yield batch


class ListSink:
    """Is ready at times."""

    def __init__(self, deltas: list[Delta], rng: random.Random) -> None:
        self._deltas = deltas
        self._rng = rng

    def is_ready(self) -> bool:
        return self._rng.random() < 0.8

    def put(self, deltas: list[Delta]) -> None:
        self._deltas.extend(deltas)


async def played(batches: Sequence[list[Any]], *, by_lane: bool, **options: Any) -> tuple[list[Delta], Any, Any, int]:
    """Deltas, usage, what failed, and how many batches went the short way."""
    engine = LanedEngine(batches)
    model = ServedModel("m", card("m"), BytesTokenizer(), None, engine, 0)
    metrics = FrontendMetrics(CollectorRegistry())
    generation = Generation(
        model, {"token_ids": [1, 2]}, OutputOptions(**options), Context("r"),
        RequestMeter(metrics.model("m"), 0.0), ManualClock(), lambda: "id",
    )  # fmt: skip
    deltas: list[Delta] = []
    failed = None

    async def take(more: list[Delta]) -> None:
        deltas.extend(more)

    try:
        await generation.run(take, ListSink(deltas, random.Random(5)) if by_lane else None)
    except ApiError as error:
        failed = error.body()
    return deltas, generation.pipeline.usage(2), failed, engine.laned


def streams(rng: random.Random) -> list[list[Any]]:
    """Frames of one or two choices, cut into batches anyhow."""
    data, frames = TEXT.encode() * 2, []
    for index in range(rng.choice((1, 1, 2))):
        place = 0
        while place < len(data):
            size = rng.choice((0, 1, 1, 1, 2, 5))
            more = {"index": index} if index else {}
            frames.append({"token_ids": list(data[place : place + size]), "finish_reason": None, **more})
            place += size
    odd = rng.choice(("usage", "text", "error", "unknown reason", "stop id", "none"))
    more = {
        "usage": {"completion_usage": {"prompt_tokens": 3}},
        "text": {"text": "as text"},
        "error": {"error": "broken"},
        "unknown reason": {"finish_reason": "whatever"},
        "stop id": {"token_ids": [65, STOP_ID]},
        "none": {},
    }
    place = rng.randrange(len(frames))
    frames[place] = frames[place] | more[odd]
    frames.append(frame("", "length", completion_usage={"prompt_tokens": 7}))
    batches = []
    while frames:
        size = rng.choice((1, 1, 1, 2, 4))
        batches.append(frames[:size])
        frames = frames[size:]
    return batches


OPTIONS = (
    {},
    {"n": 2},
    {"stops": ["three"]},
    {"stop_ids": frozenset({STOP_ID}), "n": 2},
    {"logprobs": True},
    {"stop_ids": frozenset({STOP_ID}), "min_tokens": 60},
)


@pytest.mark.parametrize("seed", range(120))
async def test_deltas_counts_and_failures_are_those_of_the_iteration(seed: int) -> None:
    rng = random.Random(seed)
    batches, options = streams(rng), OPTIONS[seed % len(OPTIONS)]
    *expected, _ = await played(batches, by_lane=False, **options)
    *found, _ = await played(batches, by_lane=True, **options)
    assert found == expected


async def test_all_but_the_first_and_the_last_of_plain_frames_go_the_short_way() -> None:
    batches = [[frame(letter)] for letter in "abcdefgh" * 10] + [[frame("", "stop")]]
    *_, laned = await played(batches, by_lane=True)
    assert laned > 50  # the sink is ready four times of five
    *_, laned = await played(batches, by_lane=True, stops=["xyz"])
    assert laned == 0


@pytest.mark.parametrize(
    "odd",
    [
        None, 7, "text", [], {"token_ids": "AB"}, {"token_ids": [[1]]}, {"token_ids": [65], "index": []},
        {"token_ids": [65], "index": 500}, {"token_ids": [65], "index": True}, {"token_ids": None}, {},
    ],
)  # fmt: skip
async def test_what_is_no_frame_fails_its_own_stream_as_in_the_iteration(odd: Any) -> None:
    async def outcome(by_lane: bool) -> Any:
        try:
            return (await played([[frame("a")], [frame("b")], [odd], [frame("", "stop")]], by_lane=by_lane))[:3]
        except Exception as error:
            return type(error)

    assert await outcome(True) == await outcome(False)


def test_a_refused_batch_leaves_no_trace() -> None:
    pipeline = OutputPipeline(BytesTokenizer(), OutputOptions())
    pipeline.push(frame("a"))
    assert pipeline.plain_deltas([frame("b"), frame("c", "stop")]) is None
    assert pipeline.generated == 1
    assert pipeline.plain_deltas([frame("b"), frame("c")]) == [
        Delta(0, "b", None, first=False, tokens=1), Delta(0, "c", None, first=False, tokens=1),
    ]  # fmt: skip


def test_the_first_frame_of_a_choice_takes_the_long_way() -> None:
    pipeline = OutputPipeline(BytesTokenizer(), OutputOptions(n=2))
    pipeline.push(frame("a"))
    assert pipeline.plain_deltas([frame("b", index=1)]) is None

"""The frames and events that Dynamo's mocker was recorded with, from this engine. Token ids are random there."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from dynamo_es.engines.scheduling.request import EngineRequest
from dynamo_es.errors import InvalidArgument
from dynamo_es.router.hashing import compute_sequence_hashes, hash_blocks
from schemas.columns import unpack_u64
from schemas.kv_events import BlocksStored
from tests.unit.engines.test_mock_engine import ask, frames_of, running
from tests.unit.engines.test_mock_scheduling import EVENTS, scheduler

GOLDEN = Path(__file__).parents[2] / "data/golden/services"
RUNS = json.loads((GOLDEN / "mocker_runs.json").read_text())["cases"]
DEPARTURES = {
    "dp1b:grow_past_pool": "250 + 20 tokens never fit 256: refused at admission, where the reference turns for ever",
    "dp1b:after_grow": "the reference serves nobody after that one; here the next request is answered",
}
_PREFIX = "Exception: CannotConnect: Worker generate() failed before response stream: Generate Error: "


@pytest.mark.parametrize(
    "case", [case for case in RUNS if case["case"] not in DEPARTURES], ids=lambda case: case["case"]
)
async def test_a_run_has_the_recorded_frames(case: dict[str, Any]) -> None:
    recorded = [frame for _, frame in case["frames"]]
    async with running(dp_size=2 if case["case"].startswith("dp2") else 1) as engine:
        if isinstance(recorded[0], str):
            max_tokens = 0 if case["case"].endswith("max0") else None
            with pytest.raises(InvalidArgument) as error:
                await frames_of(engine, ask(range(3), max_tokens))
            assert _PREFIX + str(error.value) == recorded[0]
            return
        usage = recorded[0]["completion_usage"]
        prompt = range(usage["prompt_tokens"])
        if "repeat" in case["case"]:
            await frames_of(engine, ask(prompt, 5))
        frames = await frames_of(engine, ask(prompt, len(recorded) - 1))
    assert len(frames) == len(recorded)
    for frame, expected in zip(frames, recorded, strict=True):
        assert len(frame["token_ids"]) == len(expected["token_ids"])
        assert frame.get("finish_reason") == expected["finish_reason"]
        assert frame.get("completion_usage") == expected.get("completion_usage")


async def test_what_never_fits_is_refused_and_the_next_one_is_served() -> None:
    """The departures above."""
    async with running() as engine:
        (refused,) = await frames_of(engine, ask(range(250), 20))
        assert "request exceeds worker admission limits" in refused["finish_reason"]["error"]
        assert len(await frames_of(engine, ask(range(250), 7))) == 8


def outline(kind: str, hashes: list[int], parent: int | None, prompt_blocks: set[int]) -> tuple[Any, ...]:
    """What an event says, but for blocks with generated tokens, which are random in the recording."""
    if kind == "removed":
        return kind, len(hashes)
    known = parent if parent is None or parent in prompt_blocks else "generated"
    return kind, known, [block if block in prompt_blocks else "generated" for block in hashes]


def test_events_of_eight_prompts_that_fill_the_cache_are_the_recorded_ones() -> None:
    """In the order in which they arrived at the recorded engine; a block of an earlier request is evicted first.

    Stored and removed blocks are compared apart: here a pass tells what it evicted before what it stored, as blocks are
    taken before they are computed; the reference mixes the two in the order of the requests.
    """
    prompts = [[number] * 40 for number in (105, 100, 101, 102, 106, 103, 104, 107)]
    known = {block for prompt in prompts for block in compute_sequence_hashes(hash_blocks(prompt, 4))}
    engine = scheduler()
    engine.add(EngineRequest([1, 2, 3], 4, count(1000)))
    while engine.has_work:
        engine.complete(engine.schedule())
    assert len(engine.blocks.drain_events()) == 1
    for number, prompt in enumerate(prompts):
        engine.add(EngineRequest(prompt, 12, count(2000 * (number + 1))))
    found = []
    while engine.has_work:
        engine.complete(engine.schedule())
        for event in engine.blocks.drain_events():
            hashes = list(unpack_u64(event.sequence_hashes))
            stored = isinstance(event, BlocksStored)
            found.append(outline("stored" if stored else "removed", hashes, event.parent if stored else None, known))
    expected = []
    for item in EVENTS["concurrent_first20"]:
        ((kind, data),) = item["event"]["data"].items()
        hashes = [block["block_hash"] for block in data["blocks"]] if kind == "stored" else data["block_hashes"]
        expected.append(outline(kind, hashes, data.get("parent_hash"), known))
    for kind in ("stored", "removed"):
        recorded = [item for item in expected if item[0] == kind]
        assert [item for item in found if item[0] == kind][: len(recorded)] == recorded

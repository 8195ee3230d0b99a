"""Recorded answers of Dynamo behind its KV router: where requests go, and what they are told of it.

What mock engines say differs, and so do ids, times and counts; everything else is compared byte for byte.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynamo_es.config.tree import WorkerConfig
from tests.support.runtimes import PATIENT, wait_for
from tests.support.served_fleet import ServedFleet, served_fleet
from tests.unit.frontend.asgi_client import call
from tests.unit.frontend.golden_replay import MODEL_DIR, flat, masked, recorded

RECORDED_WORKER = 16876481170403785467
TEXT = re.compile(r'"content":"(?:[^"\\]|\\.)*"')
NUMBER = re.compile(r"(?<![\w\"])-?\d+(?:\.\d+)?(?:e-?\d+)?")
# Our mock engine says this of its prompts, too.
MORE_HERE = '"audio_tokens":null,'
# A request that nobody can take is no fault of the server: 503 here, for a worker may come that can.
NOBODY_HERE = {"kvmode/required_taint": 503, "kvmode/pin_valid_dp5": 503}


@pytest.fixture(scope="module")
def items() -> list[tuple[str, dict[str, Any]]]:
    return list(recorded(["kvmode"]))


@pytest.fixture
async def fleet() -> AsyncIterator[ServedFleet]:
    async with served_fleet(runtime=PATIENT) as fleet:
        for _ in range(2):
            await fleet.mock_worker(WorkerConfig(model_name="smol", model_path=str(MODEL_DIR)))
        yield fleet


def masked_numbers(text: str) -> str:
    """Text, ids and counts are the mock engine's; lists of the prompt's token ids stay."""
    kept = text.find('"token_ids":[')
    head, tail = (text, "") if kept < 0 else (text[:kept], text[kept:].split("]", 1)[0])
    head = TEXT.sub('"content":"T"', masked(head)).replace(MORE_HERE, "")
    return NUMBER.sub("0", head) + tail


def whole(text: str) -> str:
    """Frames that were recorded to their end."""
    if not text.startswith("data: "):
        return text
    return text[: text.rfind("\n\n") + 2]


async def test_answers_are_those_of_dynamo(fleet: ServedFleet, items: list[tuple[str, dict[str, Any]]]) -> None:
    (_, engine), *_ = fleet.models.routers()
    await wait_for(lambda: len(engine.router._candidates()) == 2)
    worker = engine.router._candidates()[0].worker_id
    mine = str(worker)
    for name, item in items:
        body = json.dumps(item["body"]).replace(str(RECORDED_WORKER), mine).encode()
        headers = {key: value.replace(str(RECORDED_WORKER), mine) for key, value in item["headers"].items()}
        async with asyncio.timeout(60):
            reply = await call(fleet.app, item["path"], body, headers=headers)
        expected = NOBODY_HERE.get(name, item["status"])
        assert reply.status == expected, (name, reply.text)
        if name in NOBODY_HERE:
            continue
        theirs, ours = item["response_body"], reply.text if reply.status < 400 else flat(reply.text)
        if "pin" in name and reply.status == 200:
            assert reply.json()["nvext"]["worker_id"]["decode_worker_id"] == worker
        frames = whole(theirs)
        ours = ours if theirs.endswith(("}", "[DONE]\n\n")) else cut_to(ours, frames)
        assert masked_numbers(ours) == masked_numbers(frames), name
    assert engine.router.open_requests == 0


def cut_to(ours: str, theirs: str) -> str:
    """As many frames of ours as there are of theirs."""
    count = theirs.count("\n\n")
    return "".join(frame + "\n\n" for frame in ours.split("\n\n")[:count])

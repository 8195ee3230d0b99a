"""What the router hashes is what the engine gets and caches (IDX-15)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.runtimes import wait_for
from tests.support.served_fleet import CHAT, COMPLETIONS, ServedFleet, served_fleet

BLOCK = 16
BOS = 256
WORDS = "the quick brown fox jumps over the lazy dog and runs away from it "


@pytest.fixture
async def fleet() -> AsyncIterator[ServedFleet]:
    async with served_fleet() as fleet:
        yield fleet


def body(path: str, text: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_IDX_15_a_prompt_that_comes_again_is_found_whole(fleet: ServedFleet, path: str) -> None:
    await fleet.mock_worker()
    (router,) = [engine.router for _, engine in fleet.models.routers()]
    first = await fleet.ask(path, max_tokens=1, **body(path, WORDS))
    full = first.json()["usage"]["prompt_tokens"] // BLOCK
    assert full > 3
    counters = router.counters
    assert (counters.matched_blocks, counters.queried_blocks) == (0, full)
    index = fleet.views.kv_index.state
    await wait_for(lambda: any(sum(model.tier_blocks) >= full for model in index.models.values()))
    second = await fleet.ask(path, max_tokens=1, **body(path, WORDS))
    assert counters.matched_blocks == full
    assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= (full - 1) * BLOCK


@pytest.mark.parametrize(
    ("path", "text", "beginnings"),
    [(CHAT, WORDS, 0), (COMPLETIONS, WORDS, 0), (COMPLETIONS, f"<s>{WORDS}", 1)],
    ids=["chat", "completion", "completion that has it"],
)
async def test_IDX_15_the_worker_gets_the_tokens_that_were_hashed_and_no_second_beginning(
    fleet: ServedFleet, path: str, text: str, beginnings: int
) -> None:
    """A tokenizer that would put ``<s>`` before a text is not asked to: a chat's template has what its model needs."""
    requests = await fleet.scripted_worker([[{"token_ids": [65], "finish_reason": "stop"}]])
    answer = await fleet.ask(path, max_tokens=1, **body(path, text))
    (request,) = requests
    assert len(request["token_ids"]) == answer.json()["usage"]["prompt_tokens"]
    assert request["token_ids"].count(BOS) == beginnings
    (router,) = [engine.router for _, engine in fleet.models.routers()]
    assert router.counters.queried_blocks == len(request["token_ids"]) // BLOCK

"""Which pool comes first for a prompt: names, hashes, readiness, age and load."""

from __future__ import annotations

import msgspec
import pytest

from dynamo_es.router.hashing import block_seed, hash_prompt
from dynamo_es.services.dc_relay.ranking import PromptQuery, find_candidates
from schemas.dc_relay import DcStatus, LoadSignal, ModelReadiness, RelayPool
from streams.dc_relay import DcRelayFold
from streams.dc_relay_state import DcRelayState
from streams.testing import FoldDriver
from tests.support.relay_stream import chunk, pool, status

PROMPT = list(range(24))
NOW_MS = FoldDriver(DcRelayFold()).now_ms + 1000


def ready(model: str = "m", *, is_ready: bool = True, aliases=(), adapters=()) -> ModelReadiness:
    return ModelReadiness("ns", model, is_ready, 1, ["aggregated"], [], list(aliases), list(adapters))


def told(dc_id: str, entry: ModelReadiness, *pools: RelayPool, **load: LoadSignal) -> DcStatus:
    made = status(dc_id, 1, 0, *pools)
    made.models = [entry]
    made.pools = [msgspec.structs.replace(each, **load) for each in made.pools]
    return made


def state(*records) -> DcRelayState:
    driver = FoldDriver(DcRelayFold())
    for record in records:
        driver.feed(record)
    assert not driver.rejected
    return driver.state


def held(dc_id: str, blocks: int, where: RelayPool | None = None, lora: str | None = None, salt: str | None = None):
    where = where or pool()
    _, hashes = hash_prompt(PROMPT, where.block_size, block_seed(lora, salt))
    return chunk(dc_id, 1, 1, where, 0, 1, *hashes[:blocks])


def find(*states: DcRelayState, query: PromptQuery | None = None, stale_after_s: float = 60.0):
    return find_candidates(states, query or PromptQuery("m", PROMPT), NOW_MS, stale_after_s)


def order(*states: DcRelayState, **options) -> list[tuple[str, int]]:
    return [(each.dc_id, each.matched_tokens) for each in find(*states, **options)]


def test_the_longest_match_counts_in_tokens_whatever_the_block_size() -> None:
    large = pool(block_size=8)
    east = state(told("east", ready(), pool()), held("east", 3))
    west = state(told("west", ready(), large), held("west", 2, large))
    assert order(east, west) == [("west", 16), ("east", 12)]


def test_what_is_not_ready_comes_behind_what_is_and_stays_in_the_answer() -> None:
    east = state(told("east", ready(is_ready=False), pool()), held("east", 6))
    west = state(told("west", ready(), pool()))
    found = find(east, west)
    assert [(each.dc_id, each.ready, each.known) for each in found] == [("west", True, False), ("east", False, True)]


def test_old_word_comes_last() -> None:
    east = state(told("east", ready(), pool()), held("east", 6))
    (candidate,) = find(east, stale_after_s=0.5)
    assert (candidate.stale, candidate.age_s) == (True, 1.0)
    assert not find(east)[0].stale


def test_of_equal_matches_the_one_that_is_used_less_and_one_that_tells_before_one_that_does_not() -> None:
    full = {"kv_used_blocks": LoadSignal(90, 1), "kv_total_blocks": LoadSignal(100, 1)}
    free = {"kv_used_blocks": LoadSignal(10, 1), "kv_total_blocks": LoadSignal(100, 1)}
    partly = {"kv_used_blocks": LoadSignal(0, 1), "kv_total_blocks": LoadSignal(100, 2)}
    states = [
        state(told("a", ready(), pool(), **partly)), state(told("b", ready(), pool(), **full)),
        state(told("c", ready(), pool(), **free)),
    ]  # fmt: skip
    found = find(*states)
    assert [(each.dc_id, each.busy) for each in found] == [("c", 0.1), ("b", 0.9), ("a", None)]
    assert found[2].to_json()["load"]["waiting"] is None


@pytest.mark.parametrize(
    ("query", "matched"),
    [
        (PromptQuery("m", PROMPT), 0),
        (PromptQuery("alias", PROMPT), 0),
        (PromptQuery("lora", PROMPT), 24),
        (PromptQuery("m", PROMPT, lora_name="lora"), 24),
        (PromptQuery("alias", PROMPT, lora_name="lora", cache_salt="s"), 0),
    ],
)
def test_a_model_goes_by_its_aliases_and_an_adapter_by_its_own_hashes(query: PromptQuery, matched: int) -> None:
    east = state(told("east", ready(aliases=["alias"], adapters=["lora"]), pool()), held("east", 6, lora="lora"))
    assert order(east, query=query) == [("east", matched)]


def test_an_eagle_pool_is_asked_with_its_own_hashes() -> None:
    _, hashes = hash_prompt(PROMPT, 4, is_eagle=True)
    made = told("east", ready(), pool())
    made.pools = [msgspec.structs.replace(each, is_eagle=True) for each in made.pools]
    assert order(state(made, chunk("east", 1, 1, pool(), 0, 1, *hashes))) == [("east", 4 * len(hashes))]
    assert len(hashes) == 5


def test_a_name_that_nobody_has_and_a_pool_of_another_namespace_are_not_there() -> None:
    other = RelayPool("elsewhere", "backend", "generate", "m", 4)
    east = state(told("east", ready(), other), held("east", 6, other))
    assert [(each.pool, each.entry.namespace, each.matched_tokens) for each in find(east)] == [(None, "ns", 0)]
    west = state(told("west", ready(is_ready=False), other), held("west", 6, other))
    assert find(west) == []
    assert find(state(told("east", ready(), pool())), query=PromptQuery("n", PROMPT)) == []


def test_of_a_data_centre_in_two_topics_the_newer_word_counts() -> None:
    old = state(told("east", ready(), pool()), held("east", 6))
    new = FoldDriver(DcRelayFold(), now_ms=NOW_MS)
    for record in (told("east", ready(), pool()), held("east", 2)):
        new.feed(record)
    assert order(old, new.state) == order(new.state, old) == [("east", 8)]


def test_a_token_that_is_none_is_refused() -> None:
    east = state(told("east", ready(), pool()), held("east", 1))
    with pytest.raises((TypeError, OverflowError)):
        find(east, query=PromptQuery("m", [2**32]))
    assert order(east, query=PromptQuery("m", [1, 2, 3])) == [("east", 0)]

from __future__ import annotations

import random

import pytest

from dynamo_es.engines.scheduling.block_manager import BlockManager
from schemas.columns import unpack_u64
from schemas.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent


def take(manager: BlockManager, hashes: list[int], computed: bool = True) -> list[int]:
    """Admit a prompt whose blocks have these sequence hashes (tokens hashes are the same) and compute it."""
    table: list[int] = []
    matched = manager.match(hashes, len(hashes))
    manager.reuse(table, hashes, matched)
    assert manager.allocate(table, len(hashes) - matched)
    if computed:
        for index in range(matched, len(hashes)):
            manager.cache(table[index], hashes[index], hashes[index], hashes[index - 1] if index else None)
    return table


def told(events: list[KvEvent]) -> list[tuple[str, int | None, tuple[int, ...]]]:
    found = []
    for event in events:
        if isinstance(event, BlocksStored):
            found.append(("stored", event.parent, unpack_u64(event.sequence_hashes)))
        elif isinstance(event, BlocksRemoved):
            found.append(("removed", None, unpack_u64(event.sequence_hashes)))
        else:
            found.append(("cleared", None, ()))
    return found


def test_IDX_07_new_blocks_name_the_cached_block_before_them() -> None:
    a, b, c, d = 1, 2, 3, 4
    manager = BlockManager(16)
    manager.release(take(manager, [a, b, c]))
    manager.drain_events()
    manager.release(take(manager, [a, b, c, d]))
    assert told(manager.drain_events()) == [("stored", c, (d,))]
    manager = BlockManager(16)
    manager.release(take(manager, [a, b]))
    manager.drain_events()
    manager.release(take(manager, [a, b, c]))
    assert told(manager.drain_events()) == [("stored", b, (c,))]


def test_a_block_is_announced_once_however_many_copies_there_are() -> None:
    manager = BlockManager(4)
    first, second = [0] * 0, [0] * 0
    manager.allocate(first, 1)
    manager.allocate(second, 1)
    manager.cache(first[0], 9, 9, None)
    manager.cache(second[0], 9, 9, None)
    assert told(manager.drain_events()) == [("stored", None, (9,))]
    manager.release(first)
    manager.release(second)
    table: list[int] = []
    manager.allocate(table, 3)
    assert told(manager.drain_events()) == [], "one copy is left"
    assert manager.match([9], 1) == 1
    manager.allocate(table, 1)
    assert told(manager.drain_events()) == [("removed", None, (9,))]
    assert manager.match([9], 1) == 0


def test_the_tail_of_a_prompt_is_evicted_before_its_beginning() -> None:
    manager = BlockManager(4)
    manager.release(take(manager, [1, 2, 3]))
    table: list[int] = []
    manager.allocate(table, 3)
    assert told(manager.drain_events()) == [("stored", None, (1, 2, 3)), ("removed", None, (3, 2))]
    assert manager.match([1, 2, 3], 3) == 1


def test_what_is_in_use_is_never_evicted() -> None:
    manager = BlockManager(3)
    take(manager, [1, 2])
    assert not manager.allocate([], 2)
    assert manager.available == 1
    assert manager.match([1, 2], 2) == 2


def test_reusing_a_block_that_nobody_holds_takes_room() -> None:
    manager = BlockManager(4)
    manager.release(take(manager, [1, 2]))
    assert manager.available == 4
    assert manager.fits([1, 2, 3, 4], 2, 4)
    assert not manager.fits([1, 2, 3, 4], 2, 5)
    held = take(manager, [1, 2])
    assert manager.fits([1, 2, 3, 4], 2, 4), "shared blocks take no room again"
    manager.release(held)


def test_blocks_that_were_not_computed_leave_no_trace() -> None:
    manager = BlockManager(4)
    manager.release(take(manager, [1, 2], computed=False))
    assert (manager.used, manager.cached, manager.drain_events()) == (0, 0, [])


def test_a_clear_waits_for_requests_to_end() -> None:
    manager = BlockManager(4)
    table = take(manager, [1])
    assert not manager.clear()
    manager.release(table)
    assert manager.clear()
    assert [type(event) for event in manager.drain_events()] == [AllBlocksCleared]
    assert manager.match([1], 1) == 0
    take(manager, [5, 6, 7, 8])


@pytest.mark.parametrize("seed", range(10))
def test_events_and_state_always_agree_with_what_can_be_matched(seed: int) -> None:
    rng = random.Random(seed)
    manager = BlockManager(12)
    prompts = [[100 * start + index for index in range(6)] for start in range(4)]
    for prompt in prompts[1:]:
        prompt[:2] = prompts[0][:2]
    announced: set[int] = set()
    tables: list[list[int]] = []
    for _ in range(400):
        prompt = rng.choice(prompts)
        matched = manager.match(prompt, 6)
        if rng.random() < 0.5 and manager.fits(prompt, matched, 6):
            tables.append(take(manager, prompt))
        elif tables:
            manager.release(tables.pop(rng.randrange(len(tables))))
        for kind, _, hashes in told(manager.drain_events()):
            announced = announced | set(hashes) if kind == "stored" else announced - set(hashes)
        state = {block for _, _, hashes in told(list(manager.state())) for block in hashes}
        assert announced == state
        assert manager.used == len({block for table in tables for block in table}) <= 12
        for prompt in prompts:
            depth = manager.match(prompt, 6)
            assert set(prompt[:depth]) <= announced
            assert depth == 6 or prompt[depth] not in announced


class Adapted:
    """What a request of an adapter has in its blocks."""

    cache_salt = None

    def __init__(self, lora_name: str | None) -> None:
        self.lora_name = lora_name

    def block_tokens(self, index: int) -> list[int]:
        return [index]


def test_blocks_of_an_adapter_that_goes_are_forgotten_and_others_stay() -> None:
    manager = BlockManager(8)
    for name, hashes in (("poet", [1, 2]), (None, [3]), ("cook", [4]), ("poet", [5])):
        table: list[int] = []
        manager.allocate(table, len(hashes))
        for index, number in enumerate(hashes):
            manager.cache(table[index], number, number, hashes[index - 1] if index else None, (Adapted(name), index))
        manager.release(table)
    copy: list[int] = []
    manager.allocate(copy, 1)
    manager.cache(copy[0], 5, 5, None, (Adapted("poet"), 0))
    manager.release(copy)
    manager.drain_events()
    assert manager.forget_adapter("poet") == 3
    assert told(manager.drain_events()) == [("removed", None, (1, 2, 5))]
    assert (manager.cached, manager.used, manager.available) == (2, 0, 8)
    assert [manager.match([number], 1) for number in (1, 2, 3, 4, 5)] == [0, 0, 1, 1, 0]
    assert manager.forget_adapter("poet") == 0
    table = []
    assert manager.allocate(table, 8)
    assert sorted(table) == list(range(8))
    assert told(manager.drain_events()) == [("removed", None, (3, 4))]

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from dynamo_es.publishers.block_normalizer import BlockNormalizer
from dynamo_es.publishers.engine_events import Cleared, EngineEvent, EngineHash, Removed, Stored
from dynamo_es.publishers.event_builder import EventBuilder
from dynamo_es.router.hashing import block_seed, compute_sequence_hashes, hash_blocks
from schemas.columns import unpack_u64
from schemas.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent, KvEvents
from tests.unit.publishers.support import Reader, chain

A, B, C, D = range(101, 105)


def stored(hashes: list[EngineHash], tokens: Any, parent: EngineHash | None = None, **fields: Any) -> Stored:
    return Stored(
        fields.pop("tier", "device"), hashes, parent, array("I", tokens), fields.pop("block_size", 4), **fields
    )


class Source:
    """A normalizer with a reader behind it."""

    def __init__(self, **options: Any) -> None:
        self.normalizer = BlockNormalizer(4, **options)
        self.reader = Reader()
        self.events: list[KvEvent] = []
        self._seq = 0
        self._publish([], reset=True)

    def apply(self, *events: EngineEvent) -> list[KvEvent]:
        out = EventBuilder()
        for event in events:
            self.normalizer.apply(event, out)
        published = out.drain()
        self._publish(published)
        self.events += published
        return published

    def lose(self) -> None:
        self.normalizer.distrust()
        self._publish([], reset=True)

    def _publish(self, events: list[KvEvent], *, reset: bool = False) -> None:
        self.reader.apply(KvEvents(1, "m", 7, 0, 1, self._seq, 4, reset, events))
        self._seq += 1

    @property
    def counters(self) -> Any:
        return self.normalizer.counters


def test_sequence_hashes_chain_over_events() -> None:
    source = Source()
    first = source.apply(stored([A, B], range(8)))
    second = source.apply(stored([C], range(8, 12), parent=B))
    expected = chain(range(12))
    assert source.reader.depth(expected) == 3
    assert isinstance(first[0], BlocksStored)
    assert first[0].parent is None
    assert isinstance(second[0], BlocksStored)
    assert second[0].parent == expected[1]
    assert unpack_u64(first[0].tokens_hashes) == tuple(hash_blocks(list(range(8)), 4))


def test_bytes_and_int_names_of_the_engine_are_alike() -> None:
    source = Source()
    source.apply(stored([b"a" * 32], range(4)), stored([b"b" * 32], range(4, 8), parent=b"a" * 32))
    assert source.reader.depth(chain(range(8))) == 2
    source.apply(Removed("device", [b"b" * 32]))
    assert source.reader.depth(chain(range(8))) == 1


def test_IDX_03_removals_below_a_removed_ancestor_are_quiet_and_a_new_store_counts() -> None:
    source = Source()
    source.apply(stored([A, B, C], range(12)), Removed("device", [A]))
    assert source.reader.depth(chain(range(12))) == 0
    source.apply(Removed("device", [B]), Removed("device", [C]), Removed("device", [A]))
    assert source.counters.noop_removals == 1
    assert not source.reader.held()
    source.apply(stored([A, B, C], range(12)))
    assert source.reader.depth(chain(range(12))) == 3


def test_IDX_04_stored_twice_must_be_removed_twice() -> None:
    source = Source()
    sequence = chain(range(4))
    source.apply(stored([A], range(4)))
    assert source.apply(stored([A], range(4))) == []
    assert source.apply(Removed("device", [A])) == []
    assert source.reader.depth(sequence) == 1
    source.apply(Removed("device", [A]))
    assert source.reader.depth(sequence) == 0
    source.apply(Removed("device", [A]), Removed("device", [999]))
    assert source.counters.noop_removals == 2
    source.apply(stored([A], range(4)))
    assert source.reader.depth(sequence) == 1, "a removal too many never makes the count negative"
    source.apply(stored([A], range(4)), Cleared(), stored([A], range(4)), Removed("device", [A]))
    assert source.reader.depth(sequence) == 0, "a clear resets the count"


def test_IDX_04_two_names_of_the_same_tokens_are_two_copies() -> None:
    source = Source()
    source.apply(stored([A], range(4)), stored([B], range(4)), Removed("device", [A]))
    assert source.reader.depth(chain(range(4))) == 1
    source.apply(Removed("device", [B]))
    assert source.reader.depth(chain(range(4))) == 0


def test_IDX_05_a_store_with_an_unknown_parent_is_counted_and_hangs_nowhere() -> None:
    source = Source()
    assert source.apply(stored([A, B, C], range(12), parent=999)) == []
    assert (source.counters.orphan_events, source.counters.orphan_blocks) == (1, 3)
    assert source.reader.depth(chain(range(12))) == 0
    assert not source.reader.held()


def test_IDX_06_orphans_join_their_chain_when_the_parent_comes() -> None:
    source = Source()
    source.apply(stored([D], range(12, 16), parent=C), stored([C], range(8, 12), parent=B))
    assert source.reader.depth(chain(range(16))) == 0
    source.apply(stored([A, B], range(8)))
    assert source.reader.depth(chain(range(16))) == 4
    assert source.counters.adopted_blocks == 2
    assert source.normalizer.waiting_blocks == 0


def test_IDX_06_what_was_evicted_while_it_waited_does_not_come_back() -> None:
    source = Source()
    source.apply(stored([C], range(8, 12), parent=B), stored([D], range(12, 16), parent=C), Removed("device", [C]))
    assert source.normalizer.waiting_blocks == 1
    source.apply(stored([A, B], range(8)))
    sequence = chain(range(16))
    assert source.reader.held() == {sequence[0], sequence[1]}
    source = Source()
    source.apply(stored([C, D], range(8, 16), parent=B), Removed("device", [C]), stored([A, B], range(8)))
    assert source.reader.held() == {sequence[0], sequence[1], sequence[3]}


def test_IDX_18_a_tier_is_removed_alone() -> None:
    source = Source()
    sequence = chain(range(4))
    source.apply(stored([A], range(4)), stored([A], range(4), tier="disk"), Removed("device", [A]))
    assert source.reader.depth(sequence) == 0
    assert source.reader.depth(sequence, tier="disk") == 1
    source.apply(Removed("device", [A]))
    assert source.reader.depth(sequence, tier="disk") == 1
    source.apply(Removed("disk", [A]))
    assert source.reader.depth(sequence, tier="disk") == 0
    assert source.normalizer.known_blocks == 0


def test_an_offloaded_block_needs_no_tokens_if_it_was_announced_before() -> None:
    source = Source()
    source.apply(stored([A, B], range(8)), stored([A, B, 77], [], tier="host_pinned", block_size=0))
    source.apply(Removed("device", [A, B]))
    assert source.reader.depth(chain(range(8)), tier="host_pinned") == 2
    assert source.counters.short_blocks == 1


def test_IDX_19_a_late_store_after_a_clear_brings_nothing_back() -> None:
    source = Source()
    source.apply(stored([A, B], range(8)))
    events = source.apply(Cleared(), stored([C], range(8, 12), parent=B))
    assert [type(event) for event in events] == [AllBlocksCleared]
    assert not source.reader.held()


def test_IDX_11_images_with_equal_placeholders_are_different_blocks() -> None:
    tokens = [1, 9, 9, 9, 9, 9, 2, 3]
    source = Source()
    source.apply(stored([A, B, C], [5, 6, 7, 8, *tokens], mm_hashes=((), (11,), (11,))))
    prompt = [5, 6, 7, 8, *tokens]
    assert source.reader.depth(chain(prompt, mm_hashes=[(), (11,), (11,)])) == 3
    assert source.reader.depth(chain(prompt, mm_hashes=[(), (12,), (12,)])) == 1
    assert source.reader.depth(chain(prompt)) == 1


def test_placeholders_become_pad_values_if_their_token_is_known() -> None:
    source = Source(mm_token_ids=frozenset({5}))
    events = source.apply(stored([A], [7, 7, 5, 5], mm_hashes=((77,),)))
    assert isinstance(events[0], BlocksStored)
    assert unpack_u64(events[0].tokens_hashes) == (10826078060621154544,)
    source = Source()
    events = source.apply(stored([A], [7, 7, 5, 5], mm_hashes=((77,),)))
    assert isinstance(events[0], BlocksStored)
    assert unpack_u64(events[0].tokens_hashes) == (884083594248460272,)


def test_each_run_of_placeholders_has_its_object_and_the_last_one_covers_the_rest() -> None:
    source = Source(mm_token_ids=frozenset({5}))
    events = source.apply(stored([A, B], [5, 1, 5, 5, 5, 2, 5, 1], mm_hashes=((8, 9), (9,))))
    pad8, pad9 = 1_000_008, 1_000_009
    assert isinstance(events[0], BlocksStored)
    assert unpack_u64(events[0].tokens_hashes) == tuple(hash_blocks([pad8, 1, pad9, pad9, pad9, 2, pad9, 1], 4))


def test_IDX_12_adapters_are_disjoint_by_name() -> None:
    source = Source()
    source.apply(stored([1], range(4)), stored([2], range(4), lora_name="x"), stored([3], range(4), lora_name="y"))
    assert len(source.reader.held()) == 3
    for lora in (None, "x", "y"):
        assert source.reader.depth(chain(range(4), lora=lora)) == 1


def test_IDX_13_a_salt_is_inherited_and_never_shared() -> None:
    source = Source()
    source.apply(stored([A], range(4), cache_salt="a"), stored([B], range(4, 8), parent=A))
    assert [source.reader.depth(chain(range(8), salt=salt)) for salt in ("a", "b", None)] == [2, 0, 0]
    assert source.reader.depth(chain(range(8), lora="a")) == 0


def test_a_block_under_two_salts_has_no_children_without_one() -> None:
    source = Source()
    source.apply(stored([A], range(4), cache_salt="a"), stored([A], range(4), cache_salt="b"))
    assert source.reader.held() == set(chain(range(4), salt="b")), "only what it names now"
    assert source.apply(stored([B], range(4, 8), parent=A)) == []
    assert source.counters.ambiguous_events == 1
    source.apply(stored([C], range(4, 8), parent=A, cache_salt="b"))
    assert source.reader.depth(chain(range(8), salt="b")) == 2
    source.apply(Removed("device", [A]))
    assert source.reader.depth(chain(range(4), salt="b")) == 1
    source.apply(Removed("device", [A]))
    assert source.reader.depth(chain(range(4), salt="b")) == 0


def test_a_name_that_is_used_for_other_tokens_forgets_what_it_named() -> None:
    source = Source()
    source.apply(stored([A, B], range(8)), stored([A, C], range(20, 28)))
    assert source.reader.held() == {chain(range(8))[1], *chain(range(20, 28))}
    assert source.counters.redefined_blocks == 1


def test_blocks_of_another_size_or_without_tokens_are_not_published() -> None:
    source = Source()
    source.apply(stored([A, B], range(8), block_size=8))
    assert source.counters.size_mismatch_events == 1
    source.apply(stored([A, B], range(7)))
    assert source.counters.short_blocks == 1
    assert source.reader.held() == set(chain(range(4)))
    source.apply(stored([A], range(20)))
    assert source.counters.duplicate_blocks == 1, "surplus tokens are ignored"


def test_self_referencing_stores_are_ignored() -> None:
    source = Source()
    assert source.apply(stored([A, A], range(8)), stored([B], range(4), parent=B)) == []
    assert source.counters.self_referencing_events == 2


def test_eagle_windows_reach_one_token_further() -> None:
    source = Source()
    source.apply(stored([A, B], range(9), is_eagle=True))
    assert source.reader.depth(chain(range(9), is_eagle=True)) == 2


def test_a_duplicate_in_the_middle_keeps_the_chain_of_what_follows() -> None:
    source = Source()
    source.apply(stored([B], range(4, 8), parent=None))
    source.normalizer.forget()
    source = Source()
    source.apply(stored([A, B], range(8)), Removed("device", [A]))
    events = source.apply(stored([A, B, C], range(12)))
    sequence = chain(range(12))
    assert [
        (event.parent, unpack_u64(event.sequence_hashes)) for event in events if isinstance(event, BlocksStored)
    ] == [
        (None, (sequence[0],)),
        (sequence[1], (sequence[2],)),
    ]


def test_beyond_its_bound_blocks_are_refused_and_counted() -> None:
    source = Source(max_blocks=2)
    source.apply(stored([A, B, C], range(12)))
    assert source.counters.refused_blocks == 1
    assert source.reader.depth(chain(range(12))) == 2
    source.apply(Removed("device", [C, B]), stored([D], range(30, 34)))
    assert source.reader.held() == {chain(range(4))[0], chain(range(30, 34))[0]}
    assert source.counters.noop_removals == 1


def test_the_oldest_orphans_are_forgotten_beyond_their_bound() -> None:
    source = Source(max_waiting_blocks=2)
    for name in (11, 12, 13):
        source.apply(stored([name], range(4), parent=name + 1000))
    assert source.counters.dropped_orphans == 1
    assert source.normalizer.waiting_blocks == 2
    source.apply(stored([1011], range(40, 44)), stored([1013], range(50, 54)))
    assert source.counters.adopted_blocks == 1


def test_after_a_loss_a_store_proves_the_chain_above_it() -> None:
    source = Source()
    source.apply(stored([A, B, C], range(12)), stored([77], range(50, 54)))
    source.lose()
    assert not source.reader.held()
    source.apply(Removed("device", [77]))
    source.apply(stored([D], range(8, 12), parent=B, tier="disk"))
    assert not source.reader.held(), "another tier proves nothing"
    source.apply(stored([99], range(60, 64), parent=B))
    assert source.reader.held() == {*chain([*range(8), *range(60, 64)])}
    source.apply(Removed("device", [A]))
    assert source.reader.depth(chain(range(8))) == 0
    source.apply(stored([200], range(4), parent=77))
    assert source.counters.orphan_events == 1, "what was removed after the loss proves nothing any more"


def test_state_tells_everything_that_is_held() -> None:
    source = Source()
    source.apply(
        stored([A, B, C], range(12)),
        stored([D], range(40, 44), tier="disk"),
        stored([A], range(4), tier="disk"),
        Removed("device", [B]),
    )
    fresh = Reader()
    fresh.apply(KvEvents(1, "m", 7, 0, 1, 0, 4, True, list(source.normalizer.state())))
    assert fresh.blocks == {key: held for key, held in source.reader.blocks.items() if held}
    stores = [event for event in source.normalizer.state() if isinstance(event, BlocksStored)]
    assert [event.tier for event in stores] == ["device", "device", "disk", "disk"]
    assert stores[1].parent == chain(range(12))[1], "a parent that is gone is still named"


def test_merges_adjacent_changes_up_to_128_blocks() -> None:
    source = Source()
    events = [stored([1000], range(4))]
    events += [stored([1000 + i], range(4 * i, 4 * i + 4), parent=999 + i) for i in range(1, 300)]
    sizes = [
        len(unpack_u64(event.sequence_hashes)) for event in source.apply(*events) if isinstance(event, BlocksStored)
    ]
    assert sizes == [128, 128, 44]
    removals = source.apply(*(Removed("device", [1000 + i]) for i in range(300)))
    assert [type(event) for event in removals] == [BlocksRemoved]
    whole = source.apply(stored(list(range(300)), range(1200)))
    assert [len(unpack_u64(event.sequence_hashes)) for event in whole if isinstance(event, BlocksStored)] == [300]


@pytest.mark.parametrize("seed", range(20))
def test_random_life_agrees_with_a_model_of_the_cache(seed: int) -> None:
    rng = random.Random(seed)
    source = Source()
    prompts = [[rng.randrange(3) for _ in range(24)] for _ in range(6)]
    copies: dict[tuple[str, int], int] = {}
    for _ in range(300):
        tier = rng.choice(["device", "device", "host_pinned"])
        prompt = rng.choice(prompts)
        sequence = chain(prompt)
        if rng.random() < 0.6:
            start = rng.randrange(6)
            end = rng.randrange(start + 1, 7)
            parent = sequence[start - 1] ^ 1 if start else None
            known = {block for (_, block), count in copies.items() if count}
            names: list[EngineHash] = [block ^ 1 for block in sequence[start:end]]
            if parent is not None and sequence[start - 1] not in known:
                continue
            source.apply(stored(names, prompt[4 * start : 4 * end], parent, tier=tier))
            for block in sequence[start:end]:
                copies[tier, block] = copies.get((tier, block), 0) + 1
        elif rng.random() < 0.97:
            block = rng.choice(sequence)
            source.apply(Removed(tier, [block ^ 1]))  # type: ignore[arg-type]
            copies[tier, block] = max(0, copies.get((tier, block), 0) - 1)
        else:
            source.apply(Cleared())
            copies.clear()
        for name in ("device", "host_pinned"):
            assert source.reader.held(tier=name) == {
                block for (t, block), count in copies.items() if count and t == name
            }


def test_seeds_follow_adapter_and_salt() -> None:
    source = Source()
    events = source.apply(stored([A], range(4), lora_name="b", cache_salt="a"))
    assert isinstance(events[0], BlocksStored)
    expected = hash_blocks(list(range(4)), 4, block_seed("b", "a"))
    assert unpack_u64(events[0].tokens_hashes) == tuple(expected)
    assert unpack_u64(events[0].sequence_hashes) == tuple(compute_sequence_hashes(expected))

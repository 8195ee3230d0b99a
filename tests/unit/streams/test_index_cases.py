"""The IDX cases on the whole road: an engine's events, the publisher, ``kv-events``, the fold, a router's look-up.

Every answer is the same live, after a full replay, and from committed rows or a snapshot with the tail; and it does not
depend on when rows were committed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import count
from typing import Any

import msgspec
import pytest

from dynamo_es.clock import ManualClock
from dynamo_es.engines.scheduling.block_manager import BlockManager
from dynamo_es.publishers.kv_sources import KvSources, KvSourceSettings
from dynamo_es.publishers.rejections import RejectionReporter
from dynamo_es.router.hashing import block_seed, compute_sequence_hashes, hash_blocks, hash_prompt
from schemas.codec import TopicCodec
from schemas.columns import pack_u64
from schemas.dead_letters import DeadLetter
from schemas.kv_events import KV_EVENTS, BlocksRemoved, BlocksStored, KvEvent, KvEvents, SourceRetired
from schemas.topic import TopicSpec
from streams.kv_index import KvIndexFold
from streams.kv_index_state import KvIndexState
from streams.testing import FoldDriver
from tests.support.index_views import Depths, match_everywhere

BLOCK = 4
CLEAR = {"type": "AllBlocksCleared"}


def tokens(text: str) -> list[int]:
    """Four tokens for each letter."""
    return [ord(letter) * 10 + offset for letter in text for offset in range(BLOCK)]


def stored(text: str, after: str = "", **fields: Any) -> dict[str, Any]:
    """The engine stores the blocks of ``text`` behind those of ``after``. It names a block by its whole prefix."""
    prompt = fields.pop("token_ids", tokens(text))
    return {
        "type": "BlockStored",
        "block_hashes": names(after + text, len(after)),
        "parent_block_hash": names(after)[-1] if after else None,
        "token_ids": prompt,
        "block_size": BLOCK,
        **fields,
    }


def removed(text: str, *places: int, **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [names(text)[place] for place in places], **fields}


def names(text: str, start: int = 0) -> list[bytes]:
    return [text[: end + 1].encode().rjust(32, b".") for end in range(start, len(text))]


class Index:
    """The index of one router, fed by any number of engines."""

    def __init__(self, commit_every: int | None) -> None:
        self.driver: FoldDriver[KvIndexState] = FoldDriver(KvIndexFold())
        self.letters: list[DeadLetter] = []
        self.records = 0
        self._commit_every = commit_every

    def offer(self, topic: TopicSpec, key: bytes, value: msgspec.Struct) -> bool:
        """As an ``EventSink`` that is folded at once."""
        if isinstance(value, DeadLetter):
            self.letters.append(value)
        else:
            self.driver.feed(value, key)
            self.records += 1
            if self._commit_every is not None and self.records % self._commit_every == 0:
                self.driver.commit()
        return True

    def match(self, chain: Sequence[int], model: str = "m", block_size: int = BLOCK) -> Depths:
        return match_everywhere(self.driver, chain, model, block_size)

    def device(self, text: str, lora: str | None = None, salt: str | None = None) -> dict[tuple[int, int], int]:
        """Blocks in device memory of a text prompt."""
        chain = hash_prompt(tokens(text), BLOCK, block_seed(lora, salt))[1]
        return {rank: depths[0] for rank, depths in self.match(chain).items() if depths[0]}


class Engine:
    """One worker's engine with its publisher."""

    def __init__(self, index: Index, worker_id: int, ranks: int = 1) -> None:
        clock = ManualClock()
        incarnations = count(worker_id * 100)
        settings = KvSourceSettings(
            sink=index,
            clock=clock,
            model_name=lambda: "m",
            worker_id=worker_id,
            block_size=BLOCK,
            new_incarnation=lambda: next(incarnations),
            rank_count=lambda: ranks,
        )
        self.sources = KvSources(settings, 0, RejectionReporter(index, clock, "engine"))
        self._seq = count()
        self.send()

    def send(self, *events: dict[str, Any], rank: int | None = 0) -> None:
        """One batch, as it comes from the engine's socket."""
        if events:
            self.sources.apply_payload(msgspec.msgpack.encode([0.0, events, rank]), next(self._seq))
        self.sources.flush()

    def counters(self, rank: int = 0) -> Any:
        return self.sources.ranks[rank].normalizer.counters


@pytest.fixture(params=[None, 1, 2], ids=["never", "always", "every second"])
def index(request: pytest.FixtureRequest) -> Index:
    """``request.param``: after how many records rows are committed."""
    return Index(request.param)


def test_IDX_01_a_store_of_several_blocks_is_a_chain(index: Index) -> None:
    Engine(index, 1).send(stored("ABC"))
    assert [index.device(text) for text in ("ABC", "AB", "AC")] == [{(1, 0): 3}, {(1, 0): 2}, {(1, 0): 1}]


@pytest.mark.parametrize(("ending", "rounds"), [("removed", 10_000), ("cleared", 200), ("retired", 200)])
def test_IDX_02_short_lived_blocks_leave_nothing_behind(ending: str, rounds: int) -> None:
    index = Index(commit_every=1)
    engine = Engine(index, 1)
    engine.send(stored("P"))
    table = index.driver.state.models["m"]
    for number in range(rounds):
        suffix = {**stored("S", "P", token_ids=[number] * BLOCK), "block_hashes": [number]}
        engine.send(suffix, {"type": "BlockRemoved", "block_hashes": [number]})
    assert (table.entries(), sum(table.tier_blocks)) == (1, 1)
    # Each commit adds a row of changes, and what outgrows the blocks by 256 KiB is rewritten.
    assert sum(len(data) for _, data in index.driver.store.scan("kv-blocks")) < 2**18 + 2**10
    assert len(list(index.driver.store.scan("kv-blocks"))) < 8000
    assert (engine.sources.ranks[0].normalizer.known_blocks, engine.counters().noop_removals) == (1, 0)
    assert index.device("P") == {(1, 0): 1}
    if ending == "removed":
        engine.send(removed("P", 0))
    elif ending == "cleared":
        engine.send(CLEAR)
    else:
        index.driver.feed(KvEvents(1, "m", 1, 0, 100, 0, BLOCK, False, [SourceRetired("lease ended")]))
    while index.driver.fold.housekeep(index.driver.state):
        pass
    index.driver.commit()
    assert (table.entries(), sum(table.tier_blocks)) == (0, 0)
    assert index.device("P") == {}
    if ending != "removed":
        assert list(index.driver.store.scan("kv-blocks")) == []


def test_IDX_03_removing_an_ancestor_needs_no_order_and_leaves_no_tombstone(
    index: Index, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(index, 1)
    engine.send(stored("ABC"))
    for place in (0, 1, 2, 1):
        engine.send(removed("ABC", place))
        assert index.device("ABC") == {}
    engine.send(stored("ABC"))
    assert index.device("ABC") == {(1, 0): 3}
    assert engine.counters().noop_removals == 1
    assert (caplog.records, index.letters, index.driver.rejected) == ([], [], [])


def test_IDX_04_what_was_announced_twice_goes_with_its_second_removal(index: Index) -> None:
    engine = Engine(index, 1)
    engine.send(stored("A"))
    engine.send(stored("A"))
    engine.send(removed("A", 0))
    assert index.device("A") == {(1, 0): 1}
    engine.send(removed("A", 0))
    assert index.device("A") == {}
    engine.send(removed("A", 0), removed("X", 0))
    engine.send(stored("A"))
    assert index.device("A") == {(1, 0): 1}
    engine.send(stored("A"), CLEAR, stored("A"), removed("A", 0))
    assert index.device("A") == {}


def test_IDX_05_a_store_with_an_unknown_parent_hangs_nowhere_and_is_counted(index: Index) -> None:
    engine = Engine(index, 1)
    engine.send(stored("XYZ", "U"))
    assert index.device("XYZ") == index.device("UXYZ") == {}
    assert (engine.counters().orphan_events, engine.counters().orphan_blocks) == (1, 3)


def test_IDX_06_blocks_behind_a_transferred_prefix_count_when_the_prefix_comes(index: Index) -> None:
    Engine(index, 1).send(stored("AB"))
    decode = Engine(index, 2)
    decode.send(stored("CD", "AB"))
    assert index.device("ABCD") == {(1, 0): 2}
    decode.send(stored("AB"))
    assert index.device("ABCD") == {(1, 0): 2, (2, 0): 4}


@pytest.mark.parametrize(("cached", "asked"), [("ABC", "ABCD"), ("AB", "ABC")])
def test_IDX_07_new_blocks_hang_off_the_cached_ones(index: Index, cached: str, asked: str) -> None:
    manager = BlockManager(16)
    events = [compute(manager, cached), compute(manager, asked)]
    for seq, batch in enumerate(events):
        index.offer(KV_EVENTS, b"m/1:0", KvEvents(1, "m", 1, 0, 1, seq, BLOCK, seq == 0, batch))
    (last,) = events[1]
    assert isinstance(last, BlocksStored)
    assert last.parent == hash_prompt(tokens(cached), BLOCK)[1][-1]
    assert index.device(asked) == {(1, 0): len(asked)}


def compute(manager: BlockManager, text: str) -> list[KvEvent]:
    """What the mock engine's cache tells while it computes a prompt."""
    tokens_hashes, chain = hash_prompt(tokens(text), BLOCK)
    table: list[int] = []
    matched = manager.match(chain, len(chain))
    manager.reuse(table, chain, matched)
    assert manager.allocate(table, len(chain) - matched)
    for place in range(matched, len(chain)):
        manager.cache(table[place], chain[place], tokens_hashes[place], chain[place - 1] if place else None)
    manager.release(table)
    return manager.drain_events()


def test_IDX_08_the_rank_of_a_batch_decides(index: Index) -> None:
    Engine(index, 1, ranks=2).send(stored("AB"), rank=1)
    assert index.device("AB") == {(1, 1): 2}


def test_IDX_09_a_missing_rank_is_rank_0_only_of_a_worker_with_one(index: Index) -> None:
    Engine(index, 1).send(stored("AB"), rank=None)
    several = Engine(index, 2, ranks=4)
    several.send(stored("A"))
    several.send(stored("B", "A"), rank=None)
    assert index.device("AB") == {(1, 0): 2, (2, 0): 1}
    assert [letter.detail for letter in index.letters] == [
        "missing_rank: 1 events without a data-parallel rank, the worker has several"
    ]


def test_IDX_10_a_clear_with_a_rank_is_of_that_rank_and_one_without_of_all(index: Index) -> None:
    first, second = Engine(index, 1, ranks=2), Engine(index, 2)
    first.send(stored("A"))
    first.send(stored("B"), rank=1)
    second.send(stored("A"))
    first.send(CLEAR)
    assert (index.device("A"), index.device("B")) == ({(2, 0): 1}, {(1, 1): 1})
    first.send(stored("A"))
    first.send(CLEAR, rank=None)
    assert (index.device("A"), index.device("B")) == ({(2, 0): 1}, {})


def test_IDX_11_equal_placeholders_of_other_images_are_other_blocks(index: Index) -> None:
    prompt = [5, 5, 5, 5, 1, 9, 9, 9, 9, 9, 2, 3]
    image = [None, {"mm_objects": [{"mm_hash": 11, "offsets": [[1, 6]]}]}] * 2
    Engine(index, 1).send(stored("TIJ", token_ids=prompt, block_mm_infos=[image[0], image[1], image[1]]))

    def asked(mm_hash: int | None, start: int = 0) -> dict[Any, Any]:
        keys = () if mm_hash is None else [(), (mm_hash,), (mm_hash,)][start // BLOCK :]
        return index.match(compute_sequence_hashes(hash_blocks(prompt[start:], BLOCK, mm_hashes=keys)))

    # The text before the image matches for all.
    assert [asked(mm_hash) for mm_hash in (11, 12, None)] == [{(1, 0): (depth, 0, 0)} for depth in (3, 1, 1)]
    Engine(index, 2).send(stored("IJ", token_ids=prompt[4:], block_mm_infos=[image[1], image[1]]))
    assert [asked(mm_hash, 4) for mm_hash in (11, 12, None)] == [{(2, 0): (2, 0, 0)}, {}, {}]


def test_IDX_12_adapters_are_apart_by_name_whatever_their_numbers(index: Index) -> None:
    engine = Engine(index, 1)

    def depths() -> list[Any]:
        return [index.device("AB", lora=lora) for lora in (None, "x", "y")]

    engine.send(stored("AB", lora_name="x", lora_id=1))
    assert depths() == [{}, {(1, 0): 2}, {}]
    engine.sources.restart()
    engine.send({**stored("A", lora_name="y", lora_id=1), "block_hashes": [1]})
    engine.send({**stored("AB", lora_name="x", lora_id=2), "block_hashes": [2, 3]})
    assert depths() == [{}, {(1, 0): 2}, {(1, 0): 1}]
    # Without a name an adapter could be any, and least of all the base model.
    engine.send({**stored("AB", lora_id=2), "block_hashes": [4, 5]})
    assert depths() == [{}, {(1, 0): 2}, {(1, 0): 1}]
    assert [letter.reason for letter in index.letters] == ["missing_identity"]
    engine.send({**stored("AB"), "block_hashes": [6, 7]})
    assert depths()[0] == {(1, 0): 2}


def test_IDX_13_salts_are_apart_and_no_adapters(index: Index) -> None:
    Engine(index, 1).send(stored("AB", cache_salt="a"))
    assert [index.device("AB", salt=salt) for salt in ("a", "b", None)] == [{(1, 0): 2}, {}, {}]
    assert index.device("AB", lora="a") == index.device("AB", lora="a", salt="a") == {}


def test_IDX_14_hashes_are_the_same_in_every_process() -> None:
    program = "from dynamo_es.router.hashing import hash_prompt; print(hash_prompt(list(range(32)), 4))"
    answers = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert answers == {f"{hash_prompt(list(range(32)), 4)}\n"}


def test_IDX_14_other_hash_functions_are_another_version_which_is_refused(index: Index) -> None:
    codec = TopicCodec(KV_EVENTS)
    other = KvEvents(KV_EVENTS.version + 1, "m", 1, 0, 1, 0, BLOCK, True, [])
    with pytest.raises(Exception, match="version 2") as caught:
        codec.decode(codec.encode(other), codec.headers)
    assert "Schema" in type(caught.value).__name__


def test_IDX_16_sequences_that_collide_in_their_last_hash_are_two(index: Index) -> None:
    def send(worker_id: int, seq: int, *events: KvEvent) -> None:
        index.offer(KV_EVENTS, b"", KvEvents(1, "m", worker_id, 0, 1, seq, BLOCK, seq == 0, list(events)))

    first, second = [1, 2, 9], [3, 4, 9]
    send(1, 0, BlocksStored("device", None, pack_u64(first), pack_u64(first)))
    send(2, 0, BlocksStored("device", None, pack_u64(second), pack_u64(second)))
    assert (index.match(first), index.match(second)) == ({(1, 0): (3, 0, 0)}, {(2, 0): (3, 0, 0)})
    send(2, 1, BlocksRemoved("device", pack_u64([9])))
    assert (index.match(first), index.match(second)) == ({(1, 0): (3, 0, 0)}, {(2, 0): (2, 0, 0)})
    assert index.match(first, block_size=16) == index.match(first, model="other") == {}


def test_IDX_17_a_repeated_store_is_counted_and_changes_nothing(index: Index) -> None:
    engine = Engine(index, 1)
    engine.send(stored("AB"))
    assert engine.counters().duplicate_blocks == 0
    digest, records = index.driver.digest(), index.records
    engine.send(stored("AB"))
    assert (index.driver.digest(), index.records) == (digest, records)
    assert engine.counters().duplicate_blocks == 2
    assert index.device("AB") == {(1, 0): 2}
    # A publisher that does not count copies: the fold does not mind.
    again = BlocksStored("device", None, *(pack_u64(column) for column in reversed(hash_prompt(tokens("AB"), BLOCK))))
    index.offer(KV_EVENTS, b"", KvEvents(1, "m", 1, 0, 100, 2, BLOCK, False, [again]))
    assert index.device("AB") == {(1, 0): 2}
    index.driver.state.settle()
    assert (index.driver.state.counters.stored_noop, index.driver.rejected, index.letters) == (2, [], [])


def test_IDX_18_a_block_that_is_left_on_disk_counts_there_alone(index: Index) -> None:
    engine = Engine(index, 1)
    chain = hash_prompt(tokens("A"), BLOCK)[1]
    engine.send(stored("A", medium="GPU"))
    engine.send(stored("A", medium="DISK"))
    assert index.match(chain) == {(1, 0): (1, 0, 0)}
    engine.send(removed("A", 0, medium="GPU"))
    assert index.match(chain) == {(1, 0): (0, 0, 1)}
    engine.send(removed("A", 0, medium="GPU"))
    assert index.match(chain) == {(1, 0): (0, 0, 1)}
    engine.send(removed("A", 0, medium="DISK"))
    assert index.match(chain) == {}


def test_IDX_19_after_a_clear_a_late_block_brings_nothing_back(index: Index) -> None:
    first, second = Engine(index, 1), Engine(index, 2)
    first.send(stored("ABC"))
    second.send(stored("AB"))
    first.send(CLEAR)
    assert index.device("ABC") == {(2, 0): 2}
    first.send(stored("C", "AB"))
    assert index.device("ABC") == {(2, 0): 2}

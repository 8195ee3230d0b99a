from __future__ import annotations

import msgspec
import pytest

from dynamo_es.router.hashing import hash_prompt
from schemas.columns import pack_u64
from schemas.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvents, SourceRetired
from streams.kv_index import KvIndexFold
from streams.testing import FoldDriver
from tests.support.index_views import match_everywhere

BLOCK = 4


def hashes(text: str) -> list[int]:
    tokens = [ord(letter) * 10 + offset for letter in text for offset in range(BLOCK)]
    return hash_prompt(tokens, BLOCK)[1]


class Worker:
    def __init__(self, driver: FoldDriver, worker_id: int, rank: int = 0, incarnation: int = 1, model: str = "m"):
        self.driver, self.worker_id, self.rank, self.incarnation, self.model = (
            driver,
            worker_id,
            rank,
            incarnation,
            model,
        )
        self.seq = 0

    def send(self, *events, reset: bool | None = None, seq: int | None = None, block_size: int = BLOCK) -> None:
        number = self.seq if seq is None else seq
        reset = number == 0 if reset is None else reset
        batch = KvEvents(
            1, self.model, self.worker_id, self.rank, self.incarnation, number, block_size, reset, list(events)
        )
        self.driver.feed(batch)
        self.seq = number + 1

    def restart(self, incarnation: int) -> None:
        self.incarnation, self.seq = incarnation, 0


def stored(text: str, start: int = 0, tier: str = "device") -> BlocksStored:
    chain = hashes(text)
    column = pack_u64(chain[start:])
    return BlocksStored(tier, chain[start - 1] if start else None, column, column)


def removed(text: str, *positions: int, tier: str = "device") -> BlocksRemoved:
    chain = hashes(text)
    return BlocksRemoved(tier, pack_u64([chain[position] for position in positions]))


@pytest.fixture
def driver():
    return FoldDriver(KvIndexFold())


def overlap(driver: FoldDriver, text: str, model: str = "m", block_size: int = BLOCK) -> dict:
    return match_everywhere(driver, hashes(text), model, block_size)


def device(driver: FoldDriver, text: str) -> dict:
    return {rank: tiers[0] for rank, tiers in overlap(driver, text).items() if tiers[0]}


def test_IDX_01_a_store_of_several_blocks_is_a_chain(driver):
    Worker(driver, 1).send(stored("ABC"))
    assert device(driver, "ABC") == {(1, 0): 3}
    assert device(driver, "AB") == {(1, 0): 2}
    assert device(driver, "AC") == {(1, 0): 1}


def test_IDX_02_keys_go_away_with_their_blocks(driver):
    worker = Worker(driver, 1)
    worker.send(stored("P"))
    driver.commit()
    index = driver.state.models["m"]
    for number in range(2000):
        block = pack_u64([1_000_000 + number])
        worker.send(BlocksStored("device", hashes("P")[0], block, block), BlocksRemoved("device", block))
        if number % 500 == 0:
            driver.commit()
    assert index.entries() == 1
    driver.commit()
    worker.send(AllBlocksCleared())
    while driver.fold.housekeep(driver.state):
        pass
    assert index.entries() == 0
    assert index.tier_blocks == [0, 0, 0, 0]
    driver.commit()
    assert list(driver.store.scan("kv-blocks")) == []


def test_IDX_03_removing_an_ancestor_needs_no_order(driver):
    worker = Worker(driver, 1)
    worker.send(stored("ABC"))
    for position in (0, 1, 2):
        worker.send(removed("ABC", position))
    assert device(driver, "ABC") == {}
    worker.send(stored("ABC"))
    assert device(driver, "ABC") == {(1, 0): 3}
    assert driver.rejected == []


def test_IDX_04_removing_what_is_not_there_changes_nothing(driver):
    worker = Worker(driver, 1)
    worker.send(stored("A"), removed("B", 0), removed("A", 0), removed("A", 0))
    assert device(driver, "A") == {}
    driver.state.settle()
    assert driver.state.counters.removed_noop == 2
    assert driver.state.models["m"].tier_blocks == [0, 0, 0, 0]


def test_IDX_06_blocks_behind_a_transferred_prefix_count_when_the_prefix_comes(driver):
    Worker(driver, 1).send(stored("AB"))
    decode = Worker(driver, 2)
    decode.send(stored("ABCD", 2))
    assert device(driver, "ABCD") == {(1, 0): 2}
    decode.send(stored("AB"))
    assert device(driver, "ABCD") == {(1, 0): 2, (2, 0): 4}


def test_IDX_08_ranks_are_apart(driver):
    Worker(driver, 1, rank=0).send()
    Worker(driver, 1, rank=1).send(stored("AB"))
    assert device(driver, "AB") == {(1, 1): 2}


def test_IDX_10_a_clear_is_of_its_rank_alone(driver):
    first = Worker(driver, 1, rank=0)
    first.send(stored("A"))
    Worker(driver, 1, rank=1).send(stored("B"))
    Worker(driver, 2).send(stored("A"))
    first.send(AllBlocksCleared())
    assert device(driver, "A") == {(2, 0): 1}
    assert device(driver, "B") == {(1, 1): 1}


def test_IDX_17_a_store_that_changes_nothing_is_counted_not_an_error(driver):
    worker = Worker(driver, 1)
    worker.send(stored("AB"))
    worker.send(stored("AB"))
    assert device(driver, "AB") == {(1, 0): 2}
    driver.state.settle()
    assert driver.state.counters.stored_noop == 2
    assert driver.rejected == []


def test_IDX_18_a_tier_is_removed_alone(driver):
    worker = Worker(driver, 1)
    worker.send(stored("A"), stored("A", tier="disk"))
    worker.send(removed("A", 0))
    assert overlap(driver, "A") == {(1, 0): (0, 0, 1)}
    worker.send(removed("A", 0, tier="disk"))
    assert overlap(driver, "A") == {}


def test_lower_tiers_extend_the_device_match(driver):
    worker = Worker(driver, 1)
    chain = hashes("ABCDE")
    for position, tier in enumerate(["device", "host_pinned", "host_pinned", "disk", "external"]):
        column = pack_u64([chain[position]])
        worker.send(BlocksStored(tier, chain[position - 1] if position else None, column, column))
    assert overlap(driver, "ABCDE") == {(1, 0): (1, 2, 2)}


def test_IDX_19_after_a_clear_a_late_block_brings_nothing_back(driver):
    first, second = Worker(driver, 1), Worker(driver, 2)
    first.send(stored("ABC"))
    second.send(stored("AB"))
    first.send(AllBlocksCleared())
    assert device(driver, "ABC") == {(2, 0): 2}
    first.send(stored("ABC", 2))
    assert device(driver, "ABC") == {(2, 0): 2}


def test_IDX_16_block_sizes_and_models_are_apart(driver):
    Worker(driver, 1).send(stored("AB"))
    assert overlap(driver, "AB", block_size=8) == {}
    assert overlap(driver, "AB", model="other") == {}


def test_EVT_01_nothing_is_applied_past_a_gap_until_a_reset(driver):
    worker = Worker(driver, 1)
    worker.send(stored("A"))
    worker.send(stored("AB", 1))
    worker.send(stored("ABCDE", 4), seq=4)
    assert device(driver, "ABCDE") == {}
    assert driver.state.counters.gap_batches == 2
    worker.send(stored("X"))
    assert device(driver, "X") == {}
    worker.send(stored("ABC"), reset=True)
    assert device(driver, "ABCDE") == {(1, 0): 3}
    worker.send(stored("ABCD", 3))
    assert device(driver, "ABCDE") == {(1, 0): 4}


def test_a_source_that_is_first_seen_in_the_middle_counts_for_nothing(driver):
    worker = Worker(driver, 1)
    worker.send(stored("A"), seq=7)
    assert device(driver, "A") == {}
    worker.send(stored("A"), reset=True)
    assert device(driver, "A") == {(1, 0): 1}


def test_EVT_03_each_batch_counts_once(driver):
    worker = Worker(driver, 1)
    worker.send(stored("A"))
    worker.send(removed("A", 0))
    worker.send(stored("A"), seq=0)
    worker.send(removed("A", 0), seq=1)
    assert device(driver, "A") == {}
    assert driver.state.counters.duplicates == 2


def test_EVT_03_a_replay_that_is_cut_off_and_repeated_beside_live_batches_counts_once(driver):
    """3 to 6 of a replay of 3 to 10; then all of it again, 11 and 12 among it, as they come."""
    worker, once = Worker(driver, 1), Worker(other := FoldDriver(KvIndexFold()), 1)
    batches = [stored(chr(ord("A") + seq)) if seq % 3 else removed(chr(ord("A") + seq - 1), 0) for seq in range(1, 13)]
    for number, batch in enumerate(batches):
        once.send(batch, seq=number)
    for number in (*range(7), *range(3, 11), *range(3, 12)):
        worker.send(batches[number], seq=number)
    assert driver.digest() == other.digest()
    assert driver.state.counters.duplicates == 4 + 8
    assert driver.state.counters.gaps == 0


def test_a_reset_that_comes_twice_is_a_duplicate(driver):
    worker = Worker(driver, 1)
    worker.send(stored("A"))
    worker.send(stored("AB", 1))
    worker.send(stored("A"), seq=0, reset=True)
    assert device(driver, "AB") == {(1, 0): 2}


def test_EVT_02_identity_is_in_the_value_not_in_key_or_header(driver):
    """A mirror or a re-publish may drop both; live and replayed bytes are the same."""
    worker = Worker(driver, 1)
    worker.send(stored("AB"))
    Worker(driver, 2, rank=1, model="n").send(stored("C"))
    stripped = FoldDriver(KvIndexFold())
    for record in driver._records:
        stripped.feed_record(msgspec.structs.replace(record, key=None, headers=()))
    assert stripped.digest() == driver.digest() == driver.replayed().digest()
    assert not stripped.rejected
    nobody = msgspec.msgpack.encode(msgspec.msgpack.decode(driver._records[0].value)[-1])
    stripped.feed_record(msgspec.structs.replace(driver._records[0], offset=2, value=nobody))
    assert [reason.partition(":")[0] for reason in stripped.rejected] == ["missing_identity"]
    assert stripped.digest() == driver.digest()


def test_EVT_04_a_new_incarnation_voids_the_old_and_fences_it(driver):
    worker = Worker(driver, 1)
    worker.send(stored("AB"))
    driver.commit()
    worker.restart(2)
    worker.send(stored("C"))
    assert device(driver, "AB") == {}
    assert device(driver, "C") == {(1, 0): 1}
    worker.incarnation = 1
    worker.send(stored("ABC", 2), seq=1)
    assert device(driver, "ABC") == {}
    assert driver.state.counters.stragglers == 1


def test_DISC_11_a_restart_in_place_empties_the_index_first(driver):
    worker = Worker(driver, 1)
    worker.send(stored("AB"))
    worker.restart(9)
    worker.send()
    assert device(driver, "AB") == {}


def test_a_retired_source_is_gone_and_its_stragglers_stay_out(driver):
    worker = Worker(driver, 1)
    worker.send(stored("AB"))
    driver.commit()
    retire = KvEvents(1, "m", 1, 0, 1, 0, BLOCK, False, [SourceRetired("lease ended")])
    driver.feed(retire)
    driver.feed(retire)
    worker.send(stored("ABC", 2))
    worker.send(stored("ABC"), reset=True)
    assert device(driver, "ABC") == {}
    assert driver.state.counters.stragglers == 2
    driver.commit()
    assert device(driver, "ABC") == {}
    worker.restart(2)
    worker.send(stored("A"))
    assert device(driver, "ABC") == {(1, 0): 1}


def test_retiring_names_an_incarnation_and_spares_a_newer_one(driver):
    worker = Worker(driver, 1, incarnation=2)
    worker.send(stored("A"))
    driver.feed(KvEvents(1, "m", 1, 0, 1, 0, BLOCK, False, [SourceRetired("late")]))
    assert device(driver, "A") == {(1, 0): 1}


def test_a_block_size_that_changes_within_an_incarnation_is_refused(driver):
    worker = Worker(driver, 1)
    worker.send(stored("A"))
    worker.send(stored("B"), block_size=8)
    assert driver.rejected == ["block_size 8, this incarnation began with 4"]


def test_dead_slots_come_back_only_after_the_sweep(driver):
    worker = Worker(driver, 1)
    worker.send(stored("ABC"))
    worker.send(AllBlocksCleared())
    other = Worker(driver, 2)
    other.send(stored("A"))
    assert device(driver, "ABC") == {(2, 0): 1}
    while driver.fold.housekeep(driver.state):
        pass
    third = Worker(driver, 3)
    third.send()
    assert device(driver, "ABC") == {(2, 0): 1}


def test_compaction_keeps_the_meaning_and_makes_rows_small(driver):
    worker = Worker(driver, 1)
    worker.send(stored("KEEP"))
    column = pack_u64(range(10**18, 10**18 + 5000))
    for _ in range(10):
        worker.send(BlocksStored("device", None, column, column), BlocksRemoved("device", column))
        driver.commit()
    assert sum(len(data) for _, data in driver.store.scan("kv-blocks")) < 400_000
    assert device(driver, "KEEP") == {(1, 0): 4}

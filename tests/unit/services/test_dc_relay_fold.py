"""The fold of ``dc-relay``: who holds what, after losses, repetitions, restarts of relays, and bad records."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from schemas.dc_relay import DC_RELAY, RelayPool
from streams import dc_relay
from streams.dc_relay import DcRelayFold, contents_digest
from streams.dc_relay_state import DcRelayState
from streams.testing import FoldDriver
from tests.support.relay_stream import PlainPools, RelayStream, chunk, delta, pool, status

A, B = pool("a"), pool("b")


def driver(*records) -> FoldDriver[DcRelayState]:
    made = FoldDriver(DcRelayFold())
    for record in records:
        made.feed(record)
    return made


def held(state: DcRelayState) -> dict[tuple[str, RelayPool], set[int] | None]:
    return {
        (each.dc_id, each.pool): set(state.blocks_of(each).tolist()) if each.held is not None else None
        for each in state.pools()
    }


@pytest.mark.parametrize("seed", range(6))
def test_any_history_means_what_the_plain_model_says(seed: int) -> None:
    rng = random.Random(seed)
    streams = [iter(RelayStream(name, rng)) for name in ("east", "west")]
    made, plain = FoldDriver(DcRelayFold(mix=rng.getrandbits(64))), PlainPools()
    for number in range(600):
        record = next(rng.choice(streams))
        made.feed(record)
        plain.apply(record)
        if number % 50 == 49:
            while made.fold.housekeep(made.state):
                pass
            assert held(made.state) == plain.held
            prompt = rng.sample(range(1, 40), 6)
            for model in ("m", "n"):
                found = {(m.pool.dc_id, m.pool.pool): m.blocks for m in made.state.match(model, prompt, 4)}
                assert found == expected_matches(plain, model, prompt)
    assert made.digest() == made.replayed().digest()
    assert not made.rejected


def expected_matches(plain: PlainPools, model: str, prompt: list[int]) -> dict[tuple[str, RelayPool], int]:
    found = {}
    for key, blocks in plain.held.items():
        if key[1].model == model and blocks:
            depth = len(list(itertools.takewhile(blocks.__contains__, prompt)))
            if depth:
                found[key] = depth
    return found


def test_a_snapshot_counts_with_its_last_chunk_and_replaces_what_was_there() -> None:
    made = driver(status("x", 1, 0, A), chunk("x", 1, 1, A, 0, 1, 1, 2), chunk("x", 1, 2, A, 0, 2, 7))
    assert held(made.state) == {("x", A): {1, 2}}
    made.feed(chunk("x", 1, 3, A, 1, 2, 8))
    assert held(made.state) == {("x", A): {7, 8}}


def test_a_missing_record_makes_all_blocks_of_its_data_centre_unknown_until_their_snapshots() -> None:
    made = driver(
        status("x", 1, 0, A, B), chunk("x", 1, 1, A, 0, 1, 1), chunk("x", 1, 2, B, 0, 1, 2),
        status("y", 9, 0, A), chunk("y", 9, 1, A, 0, 1, 1), delta("x", 1, 4, A, added=[5]),
    )  # fmt: skip
    assert held(made.state) == {("x", A): None, ("x", B): None, ("y", A): {1}}
    assert made.state.match("m", [1], 4)[0].pool.dc_id == "y"
    made.feed(chunk("x", 1, 5, A, 0, 1, 1, 5))
    assert held(made.state)["x", A] == {1, 5}
    assert made.state.counters.gaps == 1


def test_a_new_life_keeps_the_old_blocks_until_its_own_come_and_fences_the_old_one() -> None:
    made = driver(status("x", 1, 0, A, B), chunk("x", 1, 1, A, 0, 1, 1), chunk("x", 1, 2, B, 0, 1, 2))
    made.feed(status("x", 2, 0, A))
    assert held(made.state) == {("x", A): {1}}
    made.feed(delta("x", 1, 3, A, added=[9]))
    assert held(made.state) == {("x", A): {1}}
    made.feed(chunk("x", 2, 1, A, 0, 1, 3))
    assert held(made.state) == {("x", A): {3}}
    assert made.state.counters.stragglers == 1


def test_a_delta_of_a_life_without_a_snapshot_is_not_trusted() -> None:
    made = driver(status("x", 1, 0, A), chunk("x", 1, 1, A, 0, 1, 1), status("x", 2, 0, A))
    made.feed(delta("x", 2, 1, A, added=[4]))
    assert held(made.state) == {("x", A): None}


def test_a_reader_may_begin_anywhere() -> None:
    made = driver(delta("x", 1, 70, A, added=[4]), chunk("x", 1, 71, A, 1, 2, 5), chunk("x", 1, 72, A, 0, 1, 6))
    assert held(made.state) == {("x", A): {6}}
    assert not made.state.counters.gaps


def test_block_sizes_and_models_are_kept_apart() -> None:
    small, large = pool(block_size=4), pool(block_size=16)
    other = pool(model="n")
    made = driver(
        status("x", 1, 0, small, large, other), chunk("x", 1, 1, small, 0, 1, 1), chunk("x", 1, 2, large, 0, 1, 1),
        chunk("x", 1, 3, other, 0, 1, 1),
    )  # fmt: skip
    assert [match.pool.pool for match in made.state.match("m", [1, 2], 16)] == [large]
    assert made.state.match("unknown", [1], 4) == []
    assert made.state.match("m", [], 4) == []


def test_a_model_without_pools_leaves_nothing_behind() -> None:
    made = driver(status("x", 1, 0, A), chunk("x", 1, 1, A, 0, 1, 1), status("x", 1, 2))
    assert not made.state.models
    assert not list(made.state.pools())


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (msgspec.structs.replace(chunk("x", 1, 0, A, 0, 1, 1), checksum=5), "checksum"),
        (msgspec.structs.replace(chunk("x", 1, 0, A, 0, 1, 1), version=2), "unknown_version"),
        (status("", 1, 0), "1 to 256 characters"),
        (status("x" * 257, 1, 0), "1 to 256 characters"),
        (None, "no deletions"),
    ],
)
def test_a_bad_record_changes_nothing(record, why: str) -> None:
    made = driver(status("x", 1, 0, A))
    before = made.digest()
    made.feed(record)
    assert len(made.rejected) == 1
    assert why in made.rejected[0]
    assert made.digest() == before


def test_bounds_hold_against_whoever_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MAX_CENTRES", 2), ("MAX_POOLS", 2), ("MAX_ALL_MODELS", 2), ("MAX_POOL_BLOCKS", 3)):
        monkeypatch.setattr(dc_relay, name, value)
    made = driver(status("x", 1, 0), status("y", 1, 0), status("z", 1, 0), status("x", 1, 1, A, B, pool("c")))
    assert ["data centres" in made.rejected[0], "pools" in made.rejected[1]] == [True, True]
    made.feed(chunk("x", 1, 1, A, 0, 1, 1))
    made.feed(chunk("x", 1, 2, pool(model="n"), 0, 1, 1))
    made.feed(chunk("x", 1, 3, B, 0, 1, 1))
    made.feed(chunk("y", 1, 1, pool(model="o"), 0, 1, 1))
    assert ["pools" in made.rejected[2], "models" in made.rejected[3]] == [True, True]
    # What was refused is a gap for what comes next; a pool that outgrows its bound is given up.
    made.feed(chunk("x", 1, 4, A, 0, 1, 1, 2, 3, 4))
    assert held(made.state)["x", A] is None


def test_the_digest_of_contents_does_not_depend_on_the_life_that_told_them() -> None:
    one = driver(status("x", 1, 0, A), chunk("x", 1, 1, A, 0, 1, 1, 2))
    other = driver(
        status("x", 1, 0, A), chunk("x", 1, 1, A, 0, 1, 7), status("x", 2, 0, A), chunk("x", 2, 1, A, 0, 2, 2),
        chunk("x", 2, 2, A, 1, 2, 1),
    )  # fmt: skip
    assert contents_digest(one.state) == contents_digest(other.state, "x")
    assert one.digest() != other.digest()
    assert DC_RELAY.retention_ms is not None
    assert DcRelayFold.horizon_ms is not None
    assert DcRelayFold.horizon_ms < DC_RELAY.retention_ms


@pytest.mark.parametrize("start", range(6))
def test_of_two_relays_with_one_id_every_reader_goes_by_the_one_that_started_last(start: int) -> None:
    records = [status("x", 1, 0, A), chunk("x", 1, 1, A, 0, 1, 11)]
    for number in range(6):
        for life, offset in ((2, 0), (1, 2)):
            seq = offset + 2 * number
            records += [status("x", life, seq, A), chunk("x", life, seq + 1, A, 0, 1, 11 * life)]
    made = driver(*records[start:])
    assert held(made.state) == {("x", A): {22}}
    # The old one goes on for a while, then ends.
    made.feed(status("x", 1, 14, A))
    made.feed(delta("x", 2, 12, A, added=[23]))
    assert held(made.state) == {("x", A): {22, 23}}


def test_an_old_relay_stays_out_however_many_came_after_it() -> None:
    made = driver(*(status("x", life, 0, A) for life in range(1, 40)))
    made.feed(status("x", 9, 5, B))
    assert made.state.centres["x"].relay == 39
    assert held(made.state) == {}
    assert made.state.counters.stragglers == 1


def test_a_data_centre_is_as_old_as_its_newest_record_says_not_its_latest_time() -> None:
    made = FoldDriver(DcRelayFold())
    made.now_ms += 10**10
    made.feed(status("x", 1, 0, A))
    made.now_ms -= 10**10
    made.feed(status("x", 1, 1, A))
    assert made.state.centres["x"].seen_ms <= made.now_ms
    made.feed(status("y", 1, 0, A))
    made.state.bound_ages(made.now_ms - 5000)
    assert {centre.seen_ms for centre in made.state.centres.values()} == {made.now_ms - 5000}


@pytest.mark.parametrize("chunks", [1, 2])
def test_many_snapshots_in_one_batch_do_not_widen_the_table(chunks: int) -> None:
    made = driver(status("x", 1, 0, A, B), chunk("x", 1, 1, A, 0, 1, *range(1, 20_001)))
    (table, *_) = made.state.models["m"].tables
    before = table.nbytes
    for number in range(1000):
        made.feed(chunk("x", 1, 2 + number, B, 0, chunks, number + 1, 30_000 + number))
    assert table.nbytes <= 2 * before
    assert set(range(1, 20_001)) == held(made.state)["x", A]


def test_all_blocks_of_a_view_have_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dc_relay, "MAX_BLOCKS", 10)
    made = driver(status("x", 1, 0, A), chunk("x", 1, 1, A, 0, 1, *range(1, 7)))
    made.feed(status("y", 1, 0, B))
    made.feed(chunk("y", 1, 1, B, 0, 1, *range(1, 6)))
    assert held(made.state) == {("x", A): set(range(1, 7)), ("y", B): None}
    made.feed(chunk("y", 1, 2, B, 0, 1, *range(1, 5)))
    made.feed(delta("x", 1, 2, A, added=[7]))
    # It is the one that grows which is given up, and comes back with a snapshot that has room.
    assert held(made.state) == {("x", A): None, ("y", B): set(range(1, 5))}
    made.feed(chunk("x", 1, 3, A, 0, 1, *range(1, 7)))
    assert held(made.state)["x", A] == set(range(1, 7))
    for seq in range(4, 40, 2):
        made.feed(delta("x", 1, seq, A, removed=[6]))
        made.feed(delta("x", 1, seq + 1, A, added=[6]))
    assert held(made.state)["x", A] == set(range(1, 7))
    assert made.digest() == made.replayed().digest()


def test_one_data_centre_with_many_models_leaves_the_others_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dc_relay, "MAX_MODELS", 2)
    made = driver()
    for name, models in (("x", "ab"), ("y", "cd")):
        pools = [pool(model=model) for model in models]
        made.feed(status(name, 1, 0, *pools))
        for seq, each in enumerate(pools):
            made.feed(chunk(name, 1, seq + 1, each, 0, 1, 1))
    assert not made.rejected
    made.feed(chunk("y", 1, 3, pool(model="e"), 0, 1, 1))
    assert "models" in made.rejected[0]
    monkeypatch.setattr(dc_relay, "MAX_ALL_MODELS", 4)
    made.feed(chunk("z", 1, 0, pool(model="e"), 0, 1, 1))
    assert "models" in made.rejected[1]


def test_many_small_pools_beside_a_large_one_count_as_much_as_they_widen_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dc_relay, "MAX_BLOCKS", 1500)
    small = [pool(f"small-{number}") for number in range(70)]
    made = driver(status("x", 1, 0, A, *small), chunk("x", 1, 1, A, 0, 1, *range(1, 1001)))
    for seq, each in enumerate(small):
        made.feed(chunk("x", 1, 2 + seq, each, 0, 1, 1))
    known = [each.pool for each in made.state.pools() if each.held is not None]
    # The 65th place would make all rows twice as wide.
    assert known == [A, *small[:63]]
    assert made.state.models["m"].tables[0].words <= 2
    assert made.digest() == made.replayed().digest()

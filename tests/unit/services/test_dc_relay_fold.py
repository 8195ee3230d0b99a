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
    for name, value in (("MAX_CENTRES", 2), ("MAX_POOLS", 2), ("MAX_MODELS", 2), ("MAX_POOL_BLOCKS", 3)):
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

from __future__ import annotations

from typing import Any

import pytest

from dynamo_es.frontend.membership import Membership, missing_worker_types, settle_membership
from schemas.registry import ModelCard
from tests.unit.frontend.fakes import card

OLD, NEW = {"tokenizer.json": "blake3:1"}, {"tokenizer.json": "blake3:2"}


def worker(number: int, sums: dict[str, str] = OLD, **changes: Any) -> ModelCard:
    return card(instance_id=number, lease_id=number, checksums=sums, **changes)


def settle(*cards: ModelCard, current: ModelCard | None = None, away: tuple[int, ...] = (), **ages: int) -> Membership:
    return settle_membership(
        cards, current, lambda one: one.instance_id not in away, lambda one: ages.get(f"w{one.instance_id}", 0)
    )


def test_the_name_stays_with_its_card_even_against_a_majority() -> None:
    found = settle(worker(1), worker(2, NEW), worker(3, NEW), current=worker(1))
    assert set(found.members) == {1}
    assert set(found.refused) == {2, 3}
    assert found.refused[2].reason == "its checksum of tokenizer.json differs from that of the model"


@pytest.mark.parametrize("cards", [(worker(2, NEW), worker(3, NEW)), (worker(1), worker(2, NEW), worker(3, NEW))])
def test_it_passes_on_when_no_worker_of_the_card_takes_requests(cards: tuple[ModelCard, ...]) -> None:
    found = settle(*cards, current=worker(1), away=(1,))
    assert set(found.members) == {2, 3}
    assert found.card.checksums == NEW
    assert not found.refused


def test_a_worker_that_takes_no_requests_keeps_the_name_if_nobody_else_does() -> None:
    assert set(settle(worker(1), current=worker(1), away=(1,)).members) == {1}


def test_without_a_holder_most_workers_win_then_the_older_ones_then_the_lower_id() -> None:
    assert settle(worker(1, NEW), worker(2), worker(3)).card.checksums == OLD
    assert settle(worker(1), worker(2, NEW), w2=5).card.checksums == NEW
    assert settle(worker(2), worker(1, NEW)).card.checksums == NEW


def test_another_endpoint_is_told_by_its_path() -> None:
    found = settle(worker(1), worker(2, component="another"), current=worker(1))
    assert "ns.another.generate" in found.refused[2].reason
    assert "--endpoint" in found.refused[2].remedy


def test_helpers_neither_hold_the_name_nor_are_refused() -> None:
    prefill = worker(1, component="prefill", worker_type="prefill")
    decode = worker(2, worker_type="decode", needs=[["prefill"]])
    found = settle(prefill, decode, current=prefill)
    assert (set(found.members), set(found.helpers), set(found.refused)) == ({2}, {1}, set())
    assert set(settle(prefill).members) == {1}


def test_every_worker_that_answers_must_have_what_it_needs() -> None:
    alone, helped = worker(1, worker_type="decode"), worker(2, worker_type="decode", needs=[["prefill"], ["encode"]])
    assert missing_worker_types([alone, helped], "decode") == ["prefill"]
    assert missing_worker_types([alone, helped, worker(3, worker_type="encode")], "decode") == []


def test_a_helper_with_another_tokenizer_is_refused_and_one_that_answers_nobody_is_not() -> None:
    decode = worker(1, worker_type="decode")
    found = settle(decode, worker(2, NEW, worker_type="prefill"), worker(3, worker_type="prefill", model_type=""))
    assert (set(found.members), set(found.helpers), set(found.refused)) == ({1}, {3}, {2})
    assert "checksum of tokenizer.json" in found.refused[2].reason


@pytest.mark.parametrize(
    ("kinds", "needs", "missing"),
    [
        ([], [], ["aggregated"]),
        (["aggregated"], [], []),
        (["decode"], [["prefill"]], ["prefill"]),
        (["decode", "prefill"], [["prefill"]], []),
        (["prefill"], [], ["decode"]),
        (["decode", "encode"], [["prefill", "encode"]], ["prefill"]),
        (["decode", "encode"], [["prefill"], ["encode"]], []),
    ],
)
def test_a_model_needs_one_of_the_alternatives_that_its_workers_ask_for(
    kinds: list[str], needs: list[list[str]], missing: list[str]
) -> None:
    cards = [worker(number, worker_type=kind, needs=needs) for number, kind in enumerate(kinds)]
    assert missing_worker_types(cards, "aggregated") == missing

"""Which adapters there are, and who answers for them."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_es.frontend.adapters import Adapter, AdapterModels, adapters_of, eligible_workers
from dynamo_es.frontend.membership import Membership
from schemas.registry import ModelCard
from tests.unit.frontend.fakes import card


def lora(name: str, worker: int, **more: Any) -> ModelCard:
    return card(name, instance_id=worker, suffix=name, lora_name=name, **more)


def membership(name: str, *workers: int, helpers: tuple[int, ...] = ()) -> Membership:
    members = {worker: card(name, instance_id=worker) for worker in workers}
    return Membership(
        members[workers[0]],
        members,
        {},
        {worker: card(name, instance_id=worker, worker_type="prefill", component="prefill") for worker in helpers},
    )


def test_an_adapter_extends_the_model_of_its_workers() -> None:
    models = {"m": membership("m", 1, 2), "other": membership("other", 5)}
    cards = [lora("a", 1), lora("a", 2), lora("b", 5), lora("a", 5), lora("lost", 9), lora("m", 1)]
    found = adapters_of(cards, models)
    assert {name: (one.base, one.holders) for name, one in found.items()} == {"a": ("m", {1, 2}), "b": ("other", {5})}
    elsewhere = [lora("a", 1, endpoint="other")]
    assert adapters_of(elsewhere, models) == {}


@pytest.mark.parametrize(
    ("holders", "allowed"),
    [
        ({1, 2}, None),
        ({1}, {1, 11, 12}),
        ({1, 11}, {1, 11}),
        ({1, 2, 11}, {1, 2, 11}),
        ({1, 2, 11, 12}, None),
    ],
)
def test_requests_go_to_holders_and_to_prefill_workers_that_say_nothing(holders: set[int], allowed: Any) -> None:
    adapter = Adapter("m", lora("a", 1), frozenset(holders))
    assert eligible_workers(adapter, membership("m", 1, 2, helpers=(11, 12))) == allowed


def test_what_did_not_change_stays() -> None:
    models, known = {"m": membership("m", 1)}, AdapterModels()
    assert known.refresh([lora("a", 1)], models) == []
    before = known.cards()["a"]
    assert known.refresh([lora("a", 1)], models) == []
    assert known.cards()["a"] is before
    assert (known.base_of("a"), known.base_of("m")) == ("m", "m")
    assert known.refresh([], models) == ["a"]
    assert not known.names()

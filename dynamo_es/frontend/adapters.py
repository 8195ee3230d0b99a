"""LoRA adapters: names that are answered by the workers, the tokenizer and the router of their base model.

Load, cache and limits belong to the workers, so an adapter has no router of its own: its requests take the base model's
one, restricted to the workers that hold the adapter. KV blocks of different adapters are told apart by their hashes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from dynamo_es.frontend.contracts import LocatingEngine, ServedModel
from dynamo_es.frontend.membership import Membership, endpoint_of
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.placement import Placement
from schemas.registry import ModelCard


@dataclass(frozen=True, slots=True)
class Adapter:
    """One LoRA adapter.

    Attributes:
        base: Name of the model that it extends.
        card: Of one of its workers.
        holders: Workers that registered it.
    """

    base: str
    card: ModelCard
    holders: frozenset[int]

    @property
    def lora_name(self) -> str:
        """What engines and block hashes know it by."""
        return self.card.lora_name or self.card.display_name


def adapters_of(cards: Iterable[ModelCard], models: Mapping[str, Membership]) -> dict[str, Adapter]:
    """Adapters by the name that requests ask for, given their cards and the models that there are.

    A worker's adapter extends the model that the worker serves on the same endpoint. A name that a model has stays that
    model's; of two models with an adapter of one name, the one with more holders has it, then the one with the
    lower name.
    """
    bases: dict[tuple[Any, int], str] = {}
    for name, membership in models.items():
        for known in (*membership.members.values(), *membership.helpers.values()):
            bases[endpoint_of(known), known.instance_id] = name
    found: dict[str, dict[str, dict[int, ModelCard]]] = {}
    for card in cards:
        base = bases.get((endpoint_of(card), card.instance_id))
        if base is not None and card.display_name not in models:
            found.setdefault(card.display_name, {}).setdefault(base, {})[card.instance_id] = card
    result = {}
    for name, candidates in found.items():
        base = min(candidates, key=lambda one: (-len(candidates[one]), one))
        holders = candidates[base]
        result[name] = Adapter(base, holders[min(holders)], frozenset(holders))
    return result


def eligible_workers(adapter: Adapter, membership: Membership) -> frozenset[int] | None:
    """Who may get its requests: its holders, and all that compute prompts if none of these is a holder; None: anybody.

    Prefill workers that say nothing of adapters apply them as they are told.
    """
    allowed = set(adapter.holders)
    if not allowed & membership.helpers.keys():
        allowed |= membership.helpers.keys()
    return None if allowed >= membership.members.keys() | membership.helpers.keys() else frozenset(allowed)


class AdapterEngine:
    """A ``TokenEngine``: that of the base model, for the requests of one adapter."""

    def __init__(self, base: LocatingEngine, lora_name: str, workers: Callable[[], frozenset[int] | None]) -> None:
        """``workers``: who may get the requests, asked for each; None: anybody."""
        self._base = base
        self._lora_name = lora_name
        self._workers = workers

    def generate(self, request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
        """As ``TokenEngine``."""
        return self._base.generate(self._adapted(request), context)

    async def locate(self, request: dict[str, Any], context: Context) -> Placement | None:
        """As ``LocatingEngine``."""
        return await self._base.locate(self._adapted(request), context)

    def _adapted(self, request: dict[str, Any]) -> dict[str, Any]:
        routing = {**(request.get("routing") or {}), "lora_name": self._lora_name}
        workers = self._workers()
        if workers is not None:
            routing["allowed_worker_ids"] = sorted(workers)
        return {**request, "routing": routing}


class AdapterModels:
    """The adapters of the fleet as models. Belongs to one event loop.

    ``refresh`` when cards or models change; then ask.
    """

    def __init__(self) -> None:
        self._known: dict[str, Adapter] = {}
        self._served: dict[str, tuple[Adapter, ServedModel, ServedModel]] = {}

    def refresh(self, cards: Iterable[ModelCard], models: Mapping[str, Membership]) -> list[str]:
        """Take over what there is now; returns the names that are gone."""
        before, found = self._known, adapters_of(cards, models)
        # What did not change stays the same object, so that it is not served anew.
        self._known = {name: before[name] if before.get(name) == one else one for name, one in found.items()}
        gone = [name for name in before if name not in self._known]
        for name in gone:
            self._served.pop(name, None)
        return gone

    def names(self) -> Collection[str]:
        """Names of all adapters."""
        return self._known.keys()

    def cards(self) -> Mapping[str, ModelCard]:
        """A card of each."""
        return {name: adapter.card for name, adapter in self._known.items()}

    def base_of(self, name: str) -> str:
        """Name of the model that answers to ``name``: its base model, if it is an adapter."""
        adapter = self._known.get(name)
        return name if adapter is None else adapter.base

    def holds(self, name: str, membership: Membership) -> Callable[[int], bool]:
        """Who of the base model's workers may get requests for ``name``, by id."""
        adapter = self._known.get(name)
        workers = None if adapter is None else eligible_workers(adapter, membership)
        return lambda worker_id: workers is None or worker_id in workers

    def served(self, name: str, base: ServedModel, membership: Callable[[], Membership]) -> ServedModel:
        """``name`` as a model: ``base`` itself, or its adapter of that name. ``membership``: of ``base``, now."""
        adapter = self._known.get(name)
        if adapter is None:
            return base
        made = self._served.get(name)
        if made is None or made[0] is not adapter or made[1] is not base:
            made = adapter, base, _served(name, adapter, base, lambda: eligible_workers(adapter, membership()))
            self._served[name] = made
        return made[2]


def _served(
    name: str, adapter: Adapter, base: ServedModel, workers: Callable[[], frozenset[int] | None]
) -> ServedModel:
    assert isinstance(base.engine, LocatingEngine)
    own = adapter.card
    card = msgspec.structs.replace(
        base.card,
        display_name=name,
        suffix=own.suffix,
        lora_name=own.lora_name,
        aliases=own.aliases,
        model_type=own.model_type or base.card.model_type,
        context_length=own.context_length or base.card.context_length,
        runtime_config={**base.card.runtime_config, **own.runtime_config},
    )
    return replace(base, name=name, card=card, engine=AdapterEngine(base.engine, adapter.lora_name, workers))

"""Which models a data centre can serve (spec/services d.7): roles that are there, and those that are needed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from schemas.dc_relay import ModelReadiness
from schemas.registry import ModelCard

# Roles whose workers must have an adapter that the model is asked for with.
_ADAPTER_ROLES = ("prefill", "decode", "aggregated")
_Key = tuple[str, str]


def find_readiness(cards: Iterable[ModelCard], is_serving: Callable[[ModelCard], bool]) -> list[ModelReadiness]:
    """One entry for each namespace and base model, sorted.

    ``cards``: of workers that are registered. ``is_serving``: whether a card's worker takes requests.
    """
    bases: dict[_Key, list[ModelCard]] = {}
    adapters: dict[tuple[str, str, str, int], list[ModelCard]] = {}
    for card in cards:
        if card.suffix:
            adapters.setdefault(_worker_of(card), []).append(card)
        else:
            bases.setdefault((card.namespace, card.display_name), []).append(card)
    found = []
    for (namespace, model), own in sorted(bases.items()):
        live = [card for card in own if is_serving(card)]
        present = {card.worker_type for card in live}
        missing = _missing(own, live)
        ready = bool(live) and not missing
        with_adapters = [(card, adapters.get(_worker_of(card), [])) for card in live]
        found.append(
            ModelReadiness(
                namespace, model, ready, len(live), sorted(present), missing,
                sorted({alias for card in own for alias in card.aliases}),
                _ready_adapters(with_adapters, present) if ready else [],
            )
        )  # fmt: skip
    return found


def _missing(own: Sequence[ModelCard], live: Sequence[ModelCard]) -> list[str]:
    """Roles that are declared, or needed by a worker, and that nobody has who takes requests."""
    if any(not card.worker_type for card in own):
        return []  # A card without a role: then any worker will do.
    present = {card.worker_type for card in live}
    missing = {card.worker_type for card in own} - present
    for card in live:
        if card.needs and not any(present.issuperset(alternative) for alternative in card.needs):
            missing |= set(card.needs[0]) - present
    return sorted(missing)


def _ready_adapters(workers: Sequence[tuple[ModelCard, Sequence[ModelCard]]], present: set[str]) -> list[str]:
    """Adapters that some worker of each role has."""
    roles: dict[str, set[str]] = {}
    for card, adapters in workers:
        for adapter in adapters:
            roles.setdefault(adapter.display_name, set()).add(card.worker_type)
    needed = present.intersection(_ADAPTER_ROLES)
    return sorted(name for name, having in roles.items() if having >= needed)


def _worker_of(card: ModelCard) -> tuple[str, str, str, int]:
    return card.namespace, card.component, card.endpoint, card.instance_id

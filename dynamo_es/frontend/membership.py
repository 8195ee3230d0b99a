"""Which workers make up a model, and which are left out because they registered something else under its name. Pure.

A name belongs to one card on one endpoint: two workers with different tokenizers cannot serve it together. It stays
with the card that has it while any worker of that card takes requests; then it passes to the card that most of the
workers have that do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from dynamo_es.runtime.model_card import differing_field
from schemas.registry import ModelCard

EndpointPath = tuple[str, str, str]
_HELPERS = ("prefill", "encode")
_ROUTING = "router_config"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a worker is not used for a model, and what its operator can do."""

    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Membership:
    """The workers of one model name.

    Attributes:
        card: What the model is.
        members: Cards of its workers, by instance id.
        helpers: Cards of workers that compute for the members and answer nobody themselves, and that have the same
            model.
        refused: Workers that registered something else under the name and take requests.
    """

    card: ModelCard
    members: Mapping[int, ModelCard]
    refused: Mapping[int, Refusal] = field(default_factory=dict)
    helpers: Mapping[int, ModelCard] = field(default_factory=dict)

    @property
    def endpoint(self) -> EndpointPath:
        """Where its workers are."""
        return endpoint_of(self.card)


def endpoint_of(card: ModelCard) -> EndpointPath:
    """Path of the endpoint that a card's worker serves."""
    return card.namespace, card.component, card.endpoint


def is_same_model(card: ModelCard, other: ModelCard) -> bool:
    """Whether workers with these cards can serve one name together."""
    return endpoint_of(card) == endpoint_of(other) and _differing(card, other) is None


def settle_membership(
    cards: Iterable[ModelCard],
    current: ModelCard | None,
    is_serving: Callable[[ModelCard], bool],
    age: Callable[[ModelCard], int],
) -> Membership:
    """Who serves the name that all these cards carry.

    Args:
        cards: All cards of the name, at least one.
        current: The card that has the name now, or None.
        is_serving: Whether a card's worker takes requests; one that starts or drains holds no name against others.
        age: How long a card's worker has been there; settles a draw for the older one.
    """
    cards = list(cards)
    answering = [card for card in cards if card.worker_type not in _HELPERS]
    groups: list[list[ModelCard]] = []
    for card in answering or cards:
        for group in groups:
            if is_same_model(card, group[0]):
                group.append(card)
                break
        else:
            groups.append([card])

    def claim(group: Sequence[ModelCard]) -> tuple[bool, bool, int, int, EndpointPath, int]:
        serving = sum(map(is_serving, group))
        first = group[0]
        return (
            not serving,
            current is None or not is_same_model(first, current),
            -serving,
            -max(map(age, group)),
            endpoint_of(first),
            min(card.instance_id for card in group),
        )

    winner = min(groups, key=claim)
    members = {card.instance_id: card for card in winner}
    refused = {
        card.instance_id: _refusal(card, winner[0])
        for group in groups
        for card in group
        if card.instance_id not in members and is_serving(card)
    }
    helpers = {}
    for card in cards:
        if card.worker_type in _HELPERS and card.namespace == winner[0].namespace and card.instance_id not in members:
            # Its model type says nothing: it answers nobody.
            differing = differing_field(msgspec.structs.replace(card, model_type=winner[0].model_type), winner[0])
            if differing is None:
                helpers[card.instance_id] = card
            elif is_serving(card):
                refused[card.instance_id] = _difference(differing)
    return Membership(winner[0], members, refused, helpers)


def missing_worker_types(serving: Sequence[ModelCard], expected: str) -> list[str]:
    """Kinds of workers that a model cannot do without and does not have, given the cards of those that serve it.

    A model needs workers that answer, and for each of these one of the alternatives (``needs``) that it asks for (spec:
    services d.7). ``expected`` is the kind that is missed if nobody is there.
    """
    if not serving:
        return [expected]
    present = {card.worker_type for card in serving}
    answering = [card for card in serving if card.worker_type not in _HELPERS]
    if not answering:
        return ["decode"]
    missing: set[str] = set()
    for card in answering:
        if not any(set(alternative) <= present for alternative in card.needs or [[]]):
            missing |= set(card.needs[0]) - present
    return sorted(missing)


def _refusal(card: ModelCard, model: ModelCard) -> Refusal:
    if endpoint_of(card) != endpoint_of(model):
        return Refusal(
            f"it serves the model on endpoint {'.'.join(endpoint_of(card))}, the model's workers are on "
            f"{'.'.join(endpoint_of(model))}",
            "start it with the same --endpoint, or with another --model-name; it takes over when they are gone",
        )
    return _difference(_differing(card, model))


def _differing(card: ModelCard, other: ModelCard) -> str | None:
    """In what two workers of one kind differ that would answer for one name."""
    same_routing = card.details.get(_ROUTING) == other.details.get(_ROUTING)
    return differing_field(card, other) or (None if same_routing else _ROUTING)


def _difference(field: str | None) -> Refusal:
    remedy = "register it with the same one" if field == _ROUTING else "start it with the model's files"
    return Refusal(
        f"its {field} differs from that of the model",
        f"{remedy}, or with another --model-name; it takes over when no worker of the model's card is left",
    )

"""The ranks that one endpoint offers: serving instances with the data-parallel ranks of their model cards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.runtime.client import Client
from schemas.registry import ModelCard
from streams.registry import RegistryState


class EndpointRanks:
    """Sorted ranks of an endpoint, from the registry view."""

    def __init__(
        self,
        registry: Callable[[], RegistryState],
        client: Client,
        endpoint: tuple[str, str, str],
        accepts: Callable[[int], bool] = lambda worker_id: True,
    ) -> None:
        self._registry = registry
        self._client = client
        self._endpoint = endpoint
        self._accepts = accepts
        self._revision = -1
        self._cards: dict[int, ModelCard] = {}

    def __call__(self) -> Sequence[WorkerRank]:
        self._refresh()
        ranks: list[WorkerRank] = []
        for instance in self._client.routable():
            if not self._accepts(instance.instance_id):
                continue
            card = self._cards.get(instance.instance_id)
            config = card.runtime_config if card is not None else {}
            start = int(config.get("data_parallel_start_rank") or 0)
            size = int(config.get("data_parallel_size") or 1)
            ranks.extend(WorkerRank(instance.instance_id, rank) for rank in range(start, start + size))
        return ranks

    def model(self) -> str:
        """Name of the base model that the endpoint serves; the endpoint's path if there is no card."""
        self._refresh()
        for card in self._cards.values():
            return card.display_name
        return "/".join(self._endpoint)

    def _refresh(self) -> None:
        state = self._registry()
        if state.revision == self._revision:
            return
        self._cards = {
            card.instance_id: card
            for card in state.models.values()
            if not card.suffix and (card.namespace, card.component, card.endpoint) == self._endpoint
        }
        self._revision = state.revision

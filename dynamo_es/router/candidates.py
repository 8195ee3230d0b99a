"""The ranks that one endpoint offers: serving instances with the data-parallel ranks of their model cards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.routing_request import UNKNOWN_WORKER, WorkerFacts
from dynamo_es.runtime.client import Client
from schemas.registry import ModelCard
from streams.registry import RegistryState

# Ranks of one worker that are believed; a card that claims more has a mistake.
MAX_RANKS_OF_WORKER = 1024
MAX_PORT = 65_535


class EndpointRanks:
    """Sorted ranks of an endpoint, and what their workers registered, from the registry view."""

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
        self._facts: dict[int, WorkerFacts] = {}

    def __call__(self) -> Sequence[WorkerRank]:
        self._refresh()
        ranks: list[WorkerRank] = []
        for instance in self._client.routable():
            if not self._accepts(instance.instance_id):
                continue
            ranks.extend(_ranks(instance.instance_id, self._cards.get(instance.instance_id)))
        return ranks

    def facts(self, worker_id: int) -> WorkerFacts:
        """What a worker registered; a ``FactsSource``."""
        self._refresh()
        return self._facts.get(worker_id, UNKNOWN_WORKER)

    def model(self) -> str:
        """Name of the base model that the endpoint serves; the endpoint's path if there is no card."""
        self._refresh()
        for card in self._cards.values():
            if self._accepts(card.instance_id):
                return card.display_name
        return "/".join(self._endpoint)

    def other_block_sizes(self, block_size: int) -> dict[int, int]:
        """Workers whose KV blocks are not of the router's size, and theirs: what they cache is matched to no prompt."""
        self._refresh()
        sizes = {worker_id: card.kv_cache_block_size for worker_id, card in self._cards.items()}
        return {worker_id: size for worker_id, size in sizes.items() if size and size != block_size}

    def worker_type(self) -> str:
        """What its workers do: ``aggregated``, ``prefill``, ``decode`` or ``encode``."""
        self._refresh()
        for card in self._cards.values():
            if self._accepts(card.instance_id):
                return card.worker_type
        return "aggregated"

    def is_eagle(self) -> bool:
        """Whether its workers hash a block with the token behind it (``enable_eagle`` of ``ModelRuntimeConfig``)."""
        self._refresh()
        for card in self._cards.values():
            if self._accepts(card.instance_id):
                return card.runtime_config.get("enable_eagle") is True
        return False

    def _refresh(self) -> None:
        state = self._registry()
        if state.revision == self._revision:
            return
        self._cards = {
            card.instance_id: card
            for card in state.models.values()
            if not card.suffix and (card.namespace, card.component, card.endpoint) == self._endpoint
        }
        devices = {instance.instance_id: instance.device_type for instance in state.instances_of(*self._endpoint)}
        self._facts = {
            worker_id: _facts_of(self._cards.get(worker_id), devices.get(worker_id, UNKNOWN_WORKER.device_type))
            for worker_id in self._cards.keys() | devices.keys()
        }
        self._revision = state.revision


def ranks_of_card(card: ModelCard) -> list[WorkerRank]:
    """The data-parallel ranks of a card's worker."""
    return _ranks(card.instance_id, card)


def _ranks(worker_id: int, card: ModelCard | None) -> list[WorkerRank]:
    config = card.runtime_config if card is not None else {}
    start = _number(config, "data_parallel_start_rank") or 0
    size = min(_number(config, "data_parallel_size") or 1, MAX_RANKS_OF_WORKER)
    return [WorkerRank(worker_id, rank) for rank in range(start, start + size)]


def _facts_of(card: ModelCard | None, device_type: str) -> WorkerFacts:
    config = card.runtime_config if card is not None else {}
    taints = config.get("taints")
    return WorkerFacts(
        taints=frozenset(taint for taint in taints if isinstance(taint, str))
        if isinstance(taints, list | tuple | set)
        else frozenset(),
        max_num_batched_tokens=_number(config, "max_num_batched_tokens"),
        total_kv_blocks=_number(config, "total_kv_blocks"),
        device_type=device_type,
        bootstrap=_bootstrap(config),
    )


def _bootstrap(config: dict[str, Any]) -> tuple[str, int] | None:
    endpoint = config.get("disaggregated_endpoint")
    if not isinstance(endpoint, dict):
        return None
    host, port = endpoint.get("bootstrap_host"), _number(endpoint, "bootstrap_port")
    return (host, port) if isinstance(host, str) and host and port and port <= MAX_PORT else None


def _number(config: dict[str, Any], name: str) -> int | None:
    """A card is another process's word: what is no count is taken as not said."""
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

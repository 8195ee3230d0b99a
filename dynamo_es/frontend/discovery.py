"""The models of the fleet as the frontend serves them: a view of the registry, with tokenizers and routers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo_es.config.tree import FrontendConfig
from dynamo_es.errors import DynamoException
from dynamo_es.frontend.contracts import Family, ModelStatus, ServedModel, families_of
from dynamo_es.frontend.engine import RoutedTokenEngine
from dynamo_es.frontend.errors import ModelNotFound, ModelNotReady
from dynamo_es.frontend.tokenizer_files import load_tokenizer
from dynamo_es.router.build import build_request_router
from dynamo_es.router.config import KvRouterSettings
from dynamo_es.router.modes import mode_named
from dynamo_es.runtime.core import RuntimeCore
from dynamo_es.runtime.discovery import serving_instances
from dynamo_es.runtime.endpoint import Endpoint
from dynamo_es.runtime.model_card import differing_field
from dynamo_es.runtime.views import RoutingViews
from schemas.registry import ModelCard

logger = logging.getLogger(__name__)
_RETRY_FIRST_S = 1.0
_RETRY_MAX_S = 30.0
_NOBODY = "no namespace has all required worker types live"


@dataclass(slots=True)
class _Model:
    """One model of one endpoint. ``refused``: workers that registered something else under its name, and why."""

    card: ModelCard
    cards: dict[int, ModelCard]
    refused: dict[int, str] = field(default_factory=dict)
    served: ServedModel | None = None
    problem: str = "its tokenizer is being loaded"
    loading: asyncio.Task[None] | None = None


class RegistryModels:
    """A ``ModelDirectory`` over the registry view. Belongs to one event loop.

    A model is one display name on one endpoint; if several endpoints serve the same name, the first by path is taken.
    Its tokenizer is loaded on a thread when the first worker appears, and again with a growing pause while that fails.
    """

    def __init__(
        self,
        core: RuntimeCore,
        views: RoutingViews,
        config: FrontendConfig,
        settings: KvRouterSettings,
        on_gone: Callable[[str], None] = lambda name: None,
    ) -> None:
        """``on_gone`` is told the name of a model whose last worker left."""
        self._core = core
        self._on_gone = on_gone
        self._views = views
        self._config = config
        self._settings = settings
        self._mode = mode_named(config.router_mode)
        self._models: dict[str, _Model] = {}
        self._aliases: dict[str, str] = {}
        self._families: frozenset[str] = frozenset()
        self._revision = -1
        core.registry.add_listener(self.refresh)
        core.add_cleanup(self.close)

    async def close(self) -> None:
        """Stop loading. Safe to call twice."""
        tasks = [model.loading for model in self._models.values() if model.loading is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def find(self, name: str) -> ServedModel:
        model = self._models.get(self._aliases.get(name, name))
        if model is None:
            raise ModelNotFound(name)
        if model.served is None:
            raise ModelNotReady(name, model.problem)
        if not self._workers(model):
            raise ModelNotReady(name, _NOBODY)
        return model.served

    def models(self) -> Sequence[tuple[str, ServedModel]]:
        result = []
        for name in (*self._models, *self._aliases):
            try:
                result.append((name, self.find(name)))
            except ModelNotReady:
                continue
        return result

    def statuses(self) -> Mapping[str, ModelStatus]:
        return {
            name: self._status(self._models[self._aliases.get(name, name)]) for name in (*self._models, *self._aliases)
        }

    def serves(self, family: Family) -> bool:
        return family in self._families

    def refused(self) -> Mapping[str, Mapping[int, str]]:
        """Workers that are left out, by model, with the reason."""
        return {name: dict(model.refused) for name, model in self._models.items() if model.refused}

    def routers(self) -> Sequence[tuple[str, RoutedTokenEngine]]:
        """Engines of the models that are loaded, for metrics."""
        return [
            (name, model.served.engine)
            for name, model in self._models.items()
            if model.served is not None and isinstance(model.served.engine, RoutedTokenEngine)
        ]

    def refresh(self) -> None:
        """Take over what changed in the registry; cheap if nothing did."""
        state = self._core.registry.state
        if state.revision == self._revision:
            return
        self._revision = state.revision
        groups = _group(list(state.models.values()), self._config.namespace)
        for name in [name for name in self._models if name not in groups]:
            self._forget(name)
        for name, cards in groups.items():
            self._update(name, cards)
        self._families = frozenset().union(*(families_of(model.card.model_type) for model in self._models.values()))
        self._aliases = {
            alias: name
            for name, model in self._models.items()
            for alias in model.card.aliases
            if alias not in self._models
        }

    def _forget(self, name: str) -> None:
        model = self._models.pop(name)
        if model.loading is not None:
            model.loading.cancel()
        logger.info("model %s is gone: its last worker left", name)
        self._on_gone(name)

    def _update(self, name: str, cards: list[ModelCard]) -> None:
        model = self._models.get(name)
        if model is None or _endpoint(model.card) != _endpoint(cards[0]):
            model = self._models[name] = _Model(cards[0], {})
            logger.info("model %s appeared on endpoint %s", name, ".".join(_endpoint(cards[0])))
        model.cards = {card.instance_id: card for card in cards}
        model.refused = {}
        for card in cards:
            difference = differing_field(card, model.card)
            if difference is not None:
                model.refused[card.instance_id] = f"{difference} differs from that of the model"
                logger.error("worker %d is not used for model %s: its %s differs", card.instance_id, name, difference)
        if model.served is None and model.loading is None:
            model.loading = asyncio.get_running_loop().create_task(self._load(name, model), name=f"load-{name}")

    async def _load(self, name: str, model: _Model) -> None:
        pause_s = _RETRY_FIRST_S
        source = self._config.model_path or model.card.source_path
        while True:
            try:
                tokenizer, renderer = await asyncio.to_thread(load_tokenizer, source)
                engine = await self._engine(model)
            except DynamoException as error:
                model.problem = f"not loaded: {error}"
                logger.error("model %s not loaded, next try in %.0f s: %s", name, pause_s, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _RETRY_MAX_S)
                continue
            created = self._core.clock.now_ms() // 1000
            model.served = ServedModel(name, model.card, tokenizer, renderer, engine, created)
            model.loading = None
            logger.info("model %s is loaded", name)
            return

    async def _engine(self, model: _Model) -> RoutedTokenEngine:
        endpoint = Endpoint(self._core, ".".join(_endpoint(model.card)))
        block_size = self._config.kv_cache_block_size or model.card.kv_cache_block_size or 16
        router, _ = await build_request_router(
            endpoint,
            self._views,
            mode=self._mode,
            block_size=block_size,
            settings=self._settings,
            accepts=lambda worker_id: worker_id not in model.refused,
        )
        return RoutedTokenEngine(router)

    def _workers(self, model: _Model) -> list[int]:
        serving = serving_instances(self._core.registry.state, *_endpoint(model.card))
        return [
            instance.instance_id
            for instance in serving
            if instance.instance_id in model.cards and instance.instance_id not in model.refused
        ]

    def _status(self, model: _Model) -> ModelStatus:
        workers = self._workers(model)
        kind = model.card.worker_type
        ready = bool(workers) and model.served is not None
        namespace: dict[str, Any] = {
            "ready": bool(workers),
            "worker_types": {kind: {"workers": len(workers), "needs": model.card.needs}},
            "present": [kind] if workers else [],
            "missing_worker_types": [] if workers else [kind],
        }
        if not workers:
            namespace["reason"] = f"missing worker types: {kind}"
        reason = None if ready else (model.problem if workers else _NOBODY)
        return ModelStatus(ready, reason, {model.card.namespace: namespace})


def _endpoint(card: ModelCard) -> tuple[str, str, str]:
    return card.namespace, card.component, card.endpoint


def _group(cards: list[ModelCard], namespace: str | None) -> dict[str, list[ModelCard]]:
    """Base-model cards by name, of one endpoint each: the first by path, in the order of registration."""
    by_name: dict[str, dict[tuple[str, str, str], list[ModelCard]]] = {}
    for card in cards:
        if not card.suffix and (namespace is None or card.namespace == namespace):
            by_name.setdefault(card.display_name, {}).setdefault(_endpoint(card), []).append(card)
    return {name: endpoints[min(endpoints)] for name, endpoints in by_name.items()}

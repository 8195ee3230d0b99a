"""The models of the fleet as the frontend serves them: a view of the registry, with tokenizers and routers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dynamo_es.config.tree import FrontendConfig
from dynamo_es.errors import ConfigError, DynamoException
from dynamo_es.frontend.adapters import AdapterModels
from dynamo_es.frontend.card_routing import ModelRouting, routing_of, routing_to_helpers
from dynamo_es.frontend.chat_factory import ChatEngines
from dynamo_es.frontend.chat_processors import ChatProcessors
from dynamo_es.frontend.contracts import TEXT, Family, ModelStatus, ServedModel, families_of
from dynamo_es.frontend.engine import RoutedTokenEngine
from dynamo_es.frontend.errors import ModelNotFound, ModelNotReady
from dynamo_es.frontend.membership import (
    EndpointPath,
    Membership,
    Refusal,
    endpoint_of,
    is_same_model,
    missing_worker_types,
    settle_membership,
)
from dynamo_es.frontend.migration import MigrationObserver, MigrationSettings
from dynamo_es.frontend.model_routing import model_routing
from dynamo_es.frontend.prefill_pool import PrefillPool
from dynamo_es.frontend.servable import NoTokenizer, generates, serves_namespace, why_unservable
from dynamo_es.frontend.tokenizer_backends import options_for
from dynamo_es.frontend.tokenizer_cache import CacheTally
from dynamo_es.frontend.tokenizer_files import load_tokenizer
from dynamo_es.models.card_json import custom_template
from dynamo_es.router.build import build_request_router
from dynamo_es.router.conditional_disagg import conditional_disagg
from dynamo_es.router.config import KvRouterSettings
from dynamo_es.router.disagg_router import DisaggRouter
from dynamo_es.router.kv_chooser import RemoteSource
from dynamo_es.router.modes import RouterMode, mode_named
from dynamo_es.router.overload import BusyThresholds, OverloadMonitor
from dynamo_es.router.prefill_times import PrefillTimes
from dynamo_es.router.request_router import RequestRouter
from dynamo_es.router.routing_report import RoutingReport
from dynamo_es.router.session_affinity import AffinitySettings
from dynamo_es.runtime.core import RuntimeCore
from dynamo_es.runtime.endpoint import Endpoint
from dynamo_es.runtime.views import RoutingViews
from schemas.registry import ModelCard, key_instance

logger = logging.getLogger(__name__)
_RETRY_FIRST_S = 1.0
_RETRY_MAX_S = 30.0
_DEFAULT_BLOCK_SIZE = 16
_NOBODY = "no namespace has all required worker types live"


@dataclass(slots=True)
class _Model:
    """One model of one endpoint. ``block_size``: of its router; ``since``: Unix seconds when it was first seen here.

    ``monitors``: of its routers; all go by ``thresholds``. ``gone``: its routers are retired, also one that is built
    only then.
    """

    membership: Membership
    block_size: int
    since: int
    served: ServedModel | None = None
    problem: str = "its tokenizer is being loaded"
    loading: asyncio.Task[None] | None = None
    thresholds: BusyThresholds = field(default_factory=BusyThresholds)
    monitors: list[OverloadMonitor] = field(default_factory=list)
    routers: list[RequestRouter] = field(default_factory=list)
    gone: bool = False

    def end(self) -> None:
        """Nobody finds it any more; requests under way go on to their end."""
        self.gone = True
        if self.loading is not None:
            self.loading.cancel()
        for router in self.routers:
            router.retire()
        if self.served is not None and self.served.processor is not None:
            self.served.processor.close()


class RegistryModels:
    """A ``ModelDirectory`` over the registry view. Belongs to one event loop.

    A model is one display name with one card on one endpoint; ``membership`` says whose it is if workers disagree.
    Its tokenizer is loaded on a thread when the first worker appears, and again with a growing pause while that fails.
    """

    def __init__(
        self,
        core: RuntimeCore,
        views: RoutingViews,
        config: FrontendConfig,
        settings: KvRouterSettings,
        on_gone: Callable[[str], None] = lambda name: None,
        *,
        affinity: AffinitySettings | None = None,
        prefill_times: PrefillTimes | None = None,
        remote: RemoteSource | None = None,
        migrations: Callable[[str], MigrationObserver | None] = lambda name: None,
        processors: ChatProcessors | None = None,
        chat_engines: ChatEngines | None = None,
        tokenizer_caches: Callable[[str], CacheTally] = lambda name: CacheTally(),
    ) -> None:
        """``on_gone`` is told the name of a model whose last worker left. ``affinity``, ``prefill_times``, ``remote``:
        of all routers, as ``build_request_router`` takes them. ``migrations``: who counts those of a model.
        ``processors``: make the models' chat processors, ``chat_engines``: engines in their place; None: there are
        none. ``tokenizer_caches``: who
        counts what a model's tokenizer finds in its cache.
        """
        self._tokenizer_caches = tokenizer_caches
        self._migrations = migrations
        self._processors = processors
        self._chat_engines = chat_engines
        self._remote = remote
        self._prefill_times = prefill_times
        self._core = core
        self._on_gone = on_gone
        self._views = views
        self._config = config
        self._models: dict[str, _Model] = {}
        # Worker types that a name lacks, and the registry's revision at which that was found.
        self._lacks: dict[str, tuple[int, list[str]]] = {}
        self._adapters = AdapterModels()
        self._aliases: dict[str, str] = {}
        self._families: frozenset[str] = frozenset()
        self._unservable: dict[int, str] = {}
        thresholds = BusyThresholds(
            config.active_decode_blocks_threshold,
            config.active_prefill_tokens_threshold,
            config.active_prefill_tokens_threshold_frac,
        )
        self._routing = ModelRouting(mode_named(config.router_mode), settings, affinity, thresholds)
        self._revision = -1
        self._changed = asyncio.Event()
        core.registry.add_listener(self.refresh)
        core.add_cleanup(self.close)

    async def close(self) -> None:
        """Stop loading, end chat processors. Safe to call twice."""
        tasks = [model.loading for model in self._models.values() if model.loading is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for model in self._models.values():
            if model.served is not None and model.served.processor is not None:
                model.served.processor.close()

    def find(self, name: str) -> ServedModel:
        primary = self._aliases.get(name, name)
        model = self._models.get(self._adapters.base_of(primary))
        if model is None:
            raise ModelNotFound(name)
        if model.served is None:
            raise ModelNotReady(name, model.problem)
        if self._missing(model, primary):
            raise ModelNotReady(name, _NOBODY)
        return self._adapters.served(primary, model.served, lambda: model.membership)

    def models(self) -> Sequence[tuple[str, ServedModel]]:
        result = []
        for name in self._names():
            try:
                result.append((name, self.find(name)))
            except ModelNotReady:
                continue
        return result

    def statuses(self) -> Mapping[str, ModelStatus]:
        found = {}
        for name in self._names():
            primary = self._aliases.get(name, name)
            base = self._adapters.base_of(primary)
            status = self._status(self._models[base], primary)
            found[name] = status if name == base else replace(status, routed_as=base)
        return found

    def _names(self) -> Sequence[str]:
        return (*self._models, *self._adapters.names(), *self._aliases)

    def serves(self, family: Family) -> bool:
        return family in self._families

    def thresholds(self) -> Mapping[str, BusyThresholds]:
        names = (*self._models, *self._adapters.names())
        return {name: self._models[self._adapters.base_of(name)].thresholds for name in names}

    def primary_name(self, name: str) -> str:
        primary = self._aliases.get(name, name)
        if self._adapters.base_of(primary) not in self._models:
            raise ModelNotFound(name)
        return primary

    def set_thresholds(self, primary_name: str, thresholds: BusyThresholds) -> None:
        model = self._models[self._adapters.base_of(primary_name)]
        model.thresholds = thresholds
        for monitor in model.monitors:
            monitor.thresholds = thresholds

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
        self._changed.set()
        groups: dict[str, list[ModelCard]] = {}
        for card in self._servable(state.models.values()):
            groups.setdefault(card.display_name, []).append(card)
        for name in [name for name in self._models if name not in groups]:
            self._forget(name)
        for name, cards in groups.items():
            self._update(name, cards)
        memberships = {name: model.membership for name, model in self._models.items()}
        adapters = [card for card in state.models.values() if card.suffix and self._is_ours(card.namespace)]
        for name in self._adapters.refresh(adapters, memberships):
            if name not in self._models:
                self._on_gone(name)
        cards_in_use = {name: membership.card for name, membership in memberships.items()}
        cards_in_use |= self._adapters.cards()
        self._families = frozenset().union(*(families_of(card.model_type) for card in cards_in_use.values()))
        self._aliases = {
            alias: name for name, card in cards_in_use.items() for alias in card.aliases if alias not in cards_in_use
        }
        self._lacks.clear()

    def _servable(self, cards: Iterable[ModelCard]) -> list[ModelCard]:
        """Cards that belong here; one that nobody can be served by is told once."""
        mine = [card for card in cards if not card.suffix and self._is_ours(card.namespace)]
        refused = {card.instance_id: why for card in mine if (why := why_unservable(card)) is not None}
        for card in mine:
            why = refused.get(card.instance_id)
            if why is not None and self._unservable.get(card.instance_id) != why:
                logger.error("worker %d of model %s is not used: %s", card.instance_id, card.display_name, why)
        self._unservable = refused
        return [card for card in mine if card.instance_id not in refused]

    def _is_ours(self, namespace: str) -> bool:
        return serves_namespace(self._config, namespace)

    async def _enough_workers(self, model: _Model) -> None:
        """Wait until as many workers serve the model as its router is to begin with."""
        wanted = self._config.router_min_initial_workers
        while (found := sum(map(self._is_serving, model.membership.members.values()))) < wanted:
            model.problem = f"{found} of {wanted} workers are there (--router-min-initial-workers)"
            self._changed.clear()
            await self._changed.wait()

    def _forget(self, name: str) -> None:
        self._models.pop(name).end()
        logger.info("model %s is gone: its last worker left", name)
        self._on_gone(name)

    def _update(self, name: str, cards: list[ModelCard]) -> None:
        model = self._models.get(name)
        current = None if model is None else model.membership.card
        membership = settle_membership(cards, current, self._is_serving, self._age)
        before = model
        if model is not None and (why := self._outdated(model, membership)):
            logger.warning("model %s starts over: no worker %s is left", name, why)
            model.end()
            model = None
        if model is None:
            thresholds = self._first_thresholds(membership.card) if before is None else before.thresholds
            now_s = self._core.clock.now_ms() // 1000
            model = _Model(membership, self._block_size(membership.card), now_s, thresholds=thresholds)
            self._models[name] = model
            logger.info("model %s appeared on endpoint %s", name, ".".join(membership.endpoint))
        self._tell(name, before, model, membership)
        model.membership = membership
        if model.served is None and model.loading is None:
            model.loading = asyncio.get_running_loop().create_task(self._load(name, model), name=f"load-{name}")

    def _tell(self, name: str, before: _Model | None, model: _Model, membership: Membership) -> None:
        """One line for each worker that is newly left out or gets no cache credit."""
        known: Mapping[int, Refusal] = {} if before is None else before.membership.refused
        for worker_id, refusal in membership.refused.items():
            if known.get(worker_id) != refusal:
                logger.error(
                    "worker %d is not used for model %s: %s; %s", worker_id, name, refusal.reason, refusal.remedy
                )
        differed = self._other_block_sizes(before.membership, before.block_size) if before is not None else {}
        for worker_id, size in self._other_block_sizes(membership, model.block_size).items():
            if differed.get(worker_id) != size:
                logger.error(
                    "worker %d of model %s has KV blocks of %d tokens, the router\'s are of %d: it serves, but its "
                    "cache earns no credit; start it with --block-size %d",
                    worker_id, name, size, model.block_size, model.block_size,
                )  # fmt: skip

    def _other_block_sizes(self, membership: Membership, block_size: int) -> dict[int, int]:
        sizes = {worker_id: card.kv_cache_block_size for worker_id, card in membership.members.items()}
        return {worker_id: size for worker_id, size in sizes.items() if size and size != block_size}

    def _outdated(self, model: _Model, membership: Membership) -> str | None:
        """What no worker has any more, so that tokenizer and router must be made anew; None: they can stay."""
        if not is_same_model(membership.card, model.membership.card):
            return "with its card"
        if all(self._block_size(card) != model.block_size for card in membership.members.values()):
            return f"of block size {model.block_size}"
        return None

    def _block_size(self, card: ModelCard) -> int:
        return self._config.kv_cache_block_size or card.kv_cache_block_size or _DEFAULT_BLOCK_SIZE

    def _is_serving(self, card: ModelCard) -> bool:
        key = key_instance(*endpoint_of(card), card.instance_id)
        instance = self._core.registry.state.instances.get(key)
        return instance is not None and instance.state == "serving"

    def _age(self, card: ModelCard) -> int:
        lease = self._core.registry.state.leases.get(card.lease_id)
        return 0 if lease is None else lease.renewal

    async def _load(self, name: str, model: _Model) -> None:
        pause_s = _RETRY_FIRST_S
        card = model.membership.card
        source = self._config.model_path or card.source_path
        options = options_for(self._config, card.runtime_config, self._tokenizer_caches(name))
        while True:
            try:
                tokenizer, renderer = (
                    (NoTokenizer(), None)
                    if card.model_input == TEXT
                    else await asyncio.to_thread(load_tokenizer, source, custom_template(card), options)
                )
                engine = await self._engine(model)
                made = self._processors
                processor = None if made is None else await made.build(card, engine, self._config.model_path)
                await self._enough_workers(model)
                served = ServedModel(
                    name, card, tokenizer, renderer, engine, model.since, engine.router.is_overloaded,
                    keeps_tools=not self._config.exclude_tools_when_tool_choice_none, processor=processor,
                )  # fmt: skip
                model.served = served if self._chat_engines is None else await self._chat_engines.over(served)
            except DynamoException as error:
                model.problem = f"not loaded: {error}"
                logger.error("model %s not loaded, next try in %.0f s: %s", name, pause_s, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _RETRY_MAX_S)
                continue
            model.loading = None
            for unknown in model.served.parsers.unknown:
                logger.error("model %s: %s is no parser that is known here, its output stays as it is", name, unknown)
            logger.info("model %s is loaded", name)
            return

    def _first_thresholds(self, card: ModelCard) -> BusyThresholds:
        try:
            return routing_of(card, self._routing).thresholds
        except ConfigError:
            return self._routing.thresholds  # why the model cannot be served is told when it is loaded

    async def _engine(self, model: _Model) -> RoutedTokenEngine:
        routing = routing_of(model.membership.card, self._routing)
        router = await self._router(
            model, routing, model.membership.endpoint, lambda worker_id: worker_id in model.membership.members
        )
        pool = PrefillPool(
            lambda: model.membership,
            self._is_serving,
            lambda endpoint, accepts: self._router(
                model,
                routing_to_helpers(model.membership.helpers.values(), endpoint, routing),
                endpoint,
                accepts,
                computes_for_others=True,
            ),
        )
        disagg = DisaggRouter(
            router,
            pool.router,
            block_size=model.block_size,
            rng=self._core.rng,
            policy=conditional_disagg(routing.settings),
            needs_prefill=pool.needed,
            is_active=pool.wanted,
        )
        card = model.membership.card
        return RoutedTokenEngine(
            router,
            disagg,
            MigrationSettings(
                self._config.migration_limit or card.migration_limit,
                self._config.migration_max_seq_len,
                card.context_length,
            ),
            self._migrations(card.display_name),
            self._core.clock.monotonic,
        )

    async def _router(
        self,
        model: _Model,
        routing: ModelRouting,
        endpoint: EndpointPath,
        accepts: Callable[[int], bool],
        *,
        computes_for_others: bool = False,
    ) -> RequestRouter:
        mode = routing.mode
        if mode is RouterMode.KV and not generates(model.membership.card):
            mode = RouterMode.LeastLoaded  # What it computes is not kept in a KV cache.
        monitor = OverloadMonitor(model.thresholds)
        model.monitors.append(monitor)
        router, _ = await build_request_router(
            Endpoint(self._core, ".".join(endpoint)),
            self._views,
            mode=mode,
            block_size=model.block_size,
            settings=routing.settings,
            accepts=accepts,
            overload=monitor,
            affinity=routing.affinity,
            prefill_times=self._prefill_times,
            computes_for_others=computes_for_others,
            remote=self._remote,
        )
        model.routers.append(router)
        if model.gone:
            router.retire()
        return router

    def _serving(self, model: _Model, name: str) -> list[ModelCard]:
        """Cards of the model's workers that take requests for ``name``, its own or an adapter's; helpers included."""
        membership = model.membership
        holds = self._adapters.holds(name, membership)
        return [
            card for cards in (membership.members, membership.helpers) for card in cards.values()
            if holds(card.instance_id) and self._is_serving(card)
        ]  # fmt: skip

    def _missing(self, model: _Model, name: str) -> list[str]:
        """Asked for each request; thousands of workers are looked at only when something of them changed."""
        revision = self._core.registry.state.revision
        known = self._lacks.get(name)
        if known is None or known[0] != revision:
            serving = self._serving(model, name)
            known = self._lacks[name] = revision, missing_worker_types(serving, model.membership.card.worker_type)
        return known[1]

    def _status(self, model: _Model, name: str) -> ModelStatus:
        serving = self._serving(model, name)
        card = model.membership.card
        missing = missing_worker_types(serving, card.worker_type)
        kinds: dict[str, dict[str, Any]] = {}
        for worker in serving:
            kinds.setdefault(worker.worker_type, {"workers": 0, "needs": worker.needs})["workers"] += 1
        namespace: dict[str, Any] = {"ready": not missing}
        if missing:
            namespace["reason"] = f"missing worker types: {', '.join(missing)}"
        namespace |= {
            "worker_types": kinds or {card.worker_type: {"workers": 0, "needs": card.needs}},
            "present": sorted(kinds),
            "missing_worker_types": missing,
        }
        ready = not missing and model.served is not None
        return ModelStatus(
            ready,
            None if ready else (_NOBODY if missing else model.problem),
            {card.namespace: namespace},
            model.membership.refused,
            model.block_size,
            self._other_block_sizes(model.membership, model.block_size),
            routing=lambda: self._routing_of(model),
        )

    def _routing_of(self, model: _Model) -> RoutingReport | None:
        if model.served is None:
            return None
        index, resyncs = self._views.kv_index, self._core.registry.state.resyncs
        return model_routing(
            model.membership.card.display_name, model.membership, self._is_serving, model.routers, model.block_size,
            None if index is None else index.state, resyncs,
        )  # fmt: skip

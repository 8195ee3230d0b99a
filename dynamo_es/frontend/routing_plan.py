"""What a frontend's options ask of its routers, checked together before anything is started."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass, field

from dynamo_es.config.aic_options import AicConfig
from dynamo_es.config.tree import FrontendConfig, RouterConfig
from dynamo_es.errors import ConfigError
from dynamo_es.router.aic_model import load_aic_times
from dynamo_es.router.config_aic import AicPerfConfig
from dynamo_es.router.config_options import settings_of
from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.router.kv_router import affinity_of
from dynamo_es.router.prefill_times import PrefillTimes
from dynamo_es.router.session_affinity import AffinitySettings


@dataclass(frozen=True, slots=True)
class RoutingPlan:
    """How the routers of all models are built.

    Attributes:
        affinity: None: sessions are not kept together.
        aic: The deployment whose prefill times are predicted; None: of none.
        remote_timeout_s: How long decisions wait for other processes' KV index; None: this one keeps its own.
        times: Of ``aic``, if they are loaded already.
    """

    settings: KvRouterSettings = field(default_factory=KvRouterSettings)
    affinity: AffinitySettings | None = None
    aic: AicPerfConfig | None = None
    remote_timeout_s: float | None = None
    times: PrefillTimes | None = None

    async def prefill_times(self) -> PrefillTimes | None:
        """Load them, if the plan has a deployment. Raises ``ConfigError``."""
        if self.times is not None:
            return self.times
        return None if self.aic is None else await asyncio.to_thread(load_aic_times, self.aic)


def plan_routing(frontend: FrontendConfig, router: RouterConfig, aic: AicConfig | None = None) -> RoutingPlan:
    """The plan that the options stand for.

    Raises:
        ConfigError: They contradict each other; names the flags.
    """
    is_kv = frontend.router_mode == "kv"
    if router.serve_indexer and router.use_remote_indexer:
        raise ConfigError("--serve-indexer and --use-remote-indexer are mutually exclusive")
    settings = settings_of(router)
    check_plan(settings, is_kv=is_kv)
    affinity = affinity_of(router.session_affinity_ttl_secs, router.session_affinity_mode)
    remote_timeout_s = router.remote_indexer_timeout_ms / 1000 if is_kv and settings.use_remote_indexer else None
    return RoutingPlan(settings, affinity, _deployment(settings, aic or AicConfig()), remote_timeout_s)


def check_plan(settings: KvRouterSettings, *, is_kv: bool) -> None:
    """Refuse what only the KV router can do where there is none. Raises ``ConfigError``, which names the flags."""
    if settings.serve_indexer and not is_kv:
        raise ConfigError("--serve-indexer requires --router-mode=kv")
    if settings.conditional_disagg_enabled:
        if not is_kv:
            raise ConfigError("--router-conditional-disagg requires --router-mode=kv")
        if not settings.use_kv_events:
            raise ConfigError("--router-conditional-disagg requires --router-kv-events")
    if settings.router_prefill_load_model != "none" and not is_kv:
        raise ConfigError("--router-prefill-load-model=aic requires --router-mode=kv")


def _deployment(settings: KvRouterSettings, options: AicConfig) -> AicPerfConfig | None:
    given = {item.name for item in dataclasses.fields(options) if getattr(options, item.name) != item.default}
    if settings.router_prefill_load_model == "none":
        if given:
            name = f"--{min(given).replace('_', '-')}"
            raise ConfigError(f"{name} requires --router-prefill-load-model=aic")
        return None
    if not {"aic_backend", "aic_system", "aic_model_path"} <= given:
        raise ConfigError("--router-prefill-load-model=aic requires --aic-backend, --aic-system and --aic-model-path")
    try:
        return AicPerfConfig(**{item.name: getattr(options, item.name) for item in dataclasses.fields(options)})
    except ValueError as error:
        raise ConfigError(str(error)) from error

"""How requests for one model are routed: as its workers registered (``register_model(router_config=…)``), or else as
the frontend's options say. Pure.

What a card says replaces the options as a whole, as in Dynamo; but for what belongs to this process: files on its disk
(queueing policies, the key of tracking hashes), and whether it keeps, serves or asks for an index.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from dynamo_es.errors import ConfigError
from dynamo_es.frontend.membership import EndpointPath, endpoint_of
from dynamo_es.models.card_json import router_config_of
from dynamo_es.router.config_settings import KvRouterSettings, check_settings
from dynamo_es.router.kv_router import affinity_of
from dynamo_es.router.modes import RouterMode
from dynamo_es.router.overload import BusyThresholds
from dynamo_es.router.session_affinity import AffinitySettings
from schemas.registry import ModelCard

_OF_THE_PROCESS = (
    "router_policy_config", "policy", "router_tracking_hash", "router_tracking_key_file", "router_tracking_key_id",
    "use_remote_indexer", "serve_indexer",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelRouting:
    """How the routers of a model are built.

    Attributes:
        affinity: None: sessions are not kept together.
        thresholds: Above what its workers count as busy, until somebody sets others.
    """

    mode: RouterMode
    settings: KvRouterSettings
    affinity: AffinitySettings | None
    thresholds: BusyThresholds


def routing_of(card: ModelCard, own: ModelRouting) -> ModelRouting:
    """As the card says, or ``own``, that of the options. Raises ``ConfigError``: the card cannot be understood."""
    kept = {name: getattr(own.settings, name) for name in _OF_THE_PROCESS}
    try:
        config = router_config_of(card)
        if config is None:
            return own
        settings = check_settings(dataclasses.replace(config.kv_router_config.settings, **kept))
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"router_config of worker {card.instance_id}: {error}") from error
    loads = config.load_thresholds
    return ModelRouting(
        config.router_mode,
        settings,
        affinity_of(config.session_affinity_ttl_secs, config.session_affinity_mode),
        BusyThresholds(
            loads.active_decode_blocks_threshold,
            loads.active_prefill_tokens_threshold,
            loads.active_prefill_tokens_threshold_frac,
        ),
    )


def routing_to_helpers(helpers: Iterable[ModelCard], endpoint: EndpointPath, model: ModelRouting) -> ModelRouting:
    """To workers that compute prompts for a model's own: as they registered, or else as to the model's.

    Raises ``ConfigError`` as ``routing_of``.
    """
    return next((routing_of(card, model) for card in helpers if endpoint_of(card) == endpoint), model)

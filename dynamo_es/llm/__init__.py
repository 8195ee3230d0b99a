"""The public names of Dynamo's ``dynamo.llm`` that this version offers, from the rooms where they live.

A script moves over by changing the import root from ``dynamo`` to ``dynamo_es``. A name's room is imported when it is
asked for: who publishes KV events needs no HTTP frontend.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo_es.engines.mock.args import MockEngineArgs as MockEngineArgs
    from dynamo_es.engines.mock.args import ReasoningConfig as ReasoningConfig
    from dynamo_es.engines.mock.args import SglangArgs as SglangArgs
    from dynamo_es.engines.mock.args import TrtllmArgs as TrtllmArgs
    from dynamo_es.entrypoint.args import EngineType as EngineType
    from dynamo_es.entrypoint.args import EntrypointArgs as EntrypointArgs
    from dynamo_es.entrypoint.engine_config import make_engine as make_engine
    from dynamo_es.entrypoint.inputs import run_input as run_input
    from dynamo_es.frontend.http_service import HttpAsyncEngine as HttpAsyncEngine
    from dynamo_es.frontend.http_service import HttpService as HttpService
    from dynamo_es.frontend.kserve.service import KserveGrpcService as KserveGrpcService
    from dynamo_es.frontend.python_engine import PythonAsyncEngine as PythonAsyncEngine
    from dynamo_es.frontend.python_engine import RoutedEngine as RoutedEngine
    from dynamo_es.frontend.route_extensions import FrontendExtensionContext as FrontendExtensionContext
    from dynamo_es.frontend.route_extensions import FrontendResponse as FrontendResponse
    from dynamo_es.frontend.route_extensions import FrontendRoute as FrontendRoute
    from dynamo_es.http_error import HttpError as HttpError
    from dynamo_es.models.deployment_card import ModelCardInstanceId as ModelCardInstanceId
    from dynamo_es.models.fetch import fetch_model as fetch_llm
    from dynamo_es.models.fetch import fetch_model as fetch_model
    from dynamo_es.models.kinds import ModelInput as ModelInput
    from dynamo_es.models.kinds import ModelType as ModelType
    from dynamo_es.models.kinds import WorkerType as WorkerType
    from dynamo_es.models.lora import LoRADownloader as LoRADownloader
    from dynamo_es.models.media_config import MediaDecoder as MediaDecoder
    from dynamo_es.models.media_config import MediaFetcher as MediaFetcher
    from dynamo_es.models.registration import register_model as register_llm
    from dynamo_es.models.registration import register_model as register_model
    from dynamo_es.models.registration import unregister_model as unregister_llm
    from dynamo_es.models.registration import unregister_model as unregister_model
    from dynamo_es.models.registration import update_model_taints as update_model_taints
    from dynamo_es.models.runtime_config import ModelRuntimeConfig as ModelRuntimeConfig
    from dynamo_es.publishers.embedding_cache import (
        MultimodalEmbeddingCachePublisher as MultimodalEmbeddingCachePublisher,
    )
    from dynamo_es.publishers.forward_pass import FpmDirectPublisher as FpmDirectPublisher
    from dynamo_es.publishers.forward_pass_reader import FpmEventSubscriber as FpmEventSubscriber
    from dynamo_es.publishers.forward_pass_relay import FpmEventRelay as FpmEventRelay
    from dynamo_es.publishers.kv_events import KvEventPublisher as KvEventPublisher
    from dynamo_es.publishers.worker_metrics import WorkerMetricsPublisher as WorkerMetricsPublisher
    from dynamo_es.router.config import KvRouterConfig as KvRouterConfig
    from dynamo_es.router.config_aic import AicPerfConfig as AicPerfConfig
    from dynamo_es.router.config_routing import LoadThresholdConfig as LoadThresholdConfig
    from dynamo_es.router.config_routing import RouterConfig as RouterConfig
    from dynamo_es.router.config_selection import SelectionCacheConfig as SelectionCacheConfig
    from dynamo_es.router.constraints import RoutingConstraints as RoutingConstraints
    from dynamo_es.router.errors import RouterQueueLimitExceeded as RouterQueueLimitExceeded
    from dynamo_es.router.hashing import compute_block_hash_for_seq as compute_block_hash_for_seq
    from dynamo_es.router.hashing import lora_name_to_id as lora_name_to_id
    from dynamo_es.router.kv_router import KvRouter as KvRouter
    from dynamo_es.router.modes import RouterMode as RouterMode
    from dynamo_es.router.radix_tree import OverlapScores as OverlapScores
    from dynamo_es.router.radix_tree import RadixTree as RadixTree
    from dynamo_es.router.selection_service import SelectionService as SelectionService
    from dynamo_es.services.dc_relay.kv_dc_relay import KvDcRelay as KvDcRelay
    from dynamo_es.services.run import run_kv_indexer as run_kv_indexer
    from dynamo_es.services.run import run_select_service as run_select_service
    from dynamo_es.services.run import run_slot_tracker as run_slot_tracker

_ROOMS = {
    "engines.mock.args": ("MockEngineArgs", "ReasoningConfig", "SglangArgs", "TrtllmArgs"),
    "entrypoint.args": ("EngineType", "EntrypointArgs"),
    "entrypoint.engine_config": ("make_engine",),
    "entrypoint.inputs": ("run_input",),
    "frontend.http_service": ("HttpAsyncEngine", "HttpService"),
    "frontend.kserve.service": ("KserveGrpcService",),
    "frontend.python_engine": ("PythonAsyncEngine", "RoutedEngine"),
    "frontend.route_extensions": ("FrontendExtensionContext", "FrontendResponse", "FrontendRoute"),
    "http_error": ("HttpError",),
    "models.deployment_card": ("ModelCardInstanceId",),
    "models.fetch": ("fetch_model",),
    "models.kinds": ("ModelInput", "ModelType", "WorkerType"),
    "models.lora": ("LoRADownloader",),
    "models.media_config": ("MediaDecoder", "MediaFetcher"),
    "models.registration": ("register_model", "unregister_model", "update_model_taints"),
    "models.runtime_config": ("ModelRuntimeConfig",),
    "publishers.embedding_cache": ("MultimodalEmbeddingCachePublisher",),
    "publishers.forward_pass": ("FpmDirectPublisher",),
    "publishers.forward_pass_reader": ("FpmEventSubscriber",),
    "publishers.forward_pass_relay": ("FpmEventRelay",),
    "publishers.kv_events": ("KvEventPublisher",),
    "publishers.worker_metrics": ("WorkerMetricsPublisher",),
    "router.config": ("KvRouterConfig",),
    "router.config_aic": ("AicPerfConfig",),
    "router.config_routing": ("LoadThresholdConfig", "RouterConfig"),
    "router.config_selection": ("SelectionCacheConfig",),
    "router.constraints": ("RoutingConstraints",),
    "router.errors": ("RouterQueueLimitExceeded",),
    "router.hashing": ("compute_block_hash_for_seq", "lora_name_to_id"),
    "router.kv_router": ("KvRouter",),
    "router.modes": ("RouterMode",),
    "router.radix_tree": ("OverlapScores", "RadixTree"),
    "router.selection_service": ("SelectionService",),
    "services.dc_relay.kv_dc_relay": ("KvDcRelay",),
    "services.run": ("run_kv_indexer", "run_select_service", "run_slot_tracker"),
}
_PLACES = {name: (room, name) for room, names in _ROOMS.items() for name in names} | {
    # Names of earlier versions of Dynamo.
    "fetch_llm": ("models.fetch", "fetch_model"),
    "register_llm": ("models.registration", "register_model"),
    "unregister_llm": ("models.registration", "unregister_model"),
}

__all__ = (
    "AicPerfConfig",
    "EngineType",
    "EntrypointArgs",
    "FpmDirectPublisher",
    "FpmEventRelay",
    "FpmEventSubscriber",
    "FrontendExtensionContext",
    "FrontendResponse",
    "FrontendRoute",
    "HttpAsyncEngine",
    "HttpError",
    "HttpService",
    "KserveGrpcService",
    "KvDcRelay",
    "KvEventPublisher",
    "KvRouter",
    "KvRouterConfig",
    "LoRADownloader",
    "LoadThresholdConfig",
    "MediaDecoder",
    "MediaFetcher",
    "MockEngineArgs",
    "ModelCardInstanceId",
    "ModelInput",
    "ModelRuntimeConfig",
    "ModelType",
    "MultimodalEmbeddingCachePublisher",
    "OverlapScores",
    "PythonAsyncEngine",
    "RadixTree",
    "ReasoningConfig",
    "RoutedEngine",
    "RouterConfig",
    "RouterMode",
    "RouterQueueLimitExceeded",
    "RoutingConstraints",
    "SelectionCacheConfig",
    "SelectionService",
    "SglangArgs",
    "TrtllmArgs",
    "WorkerMetricsPublisher",
    "WorkerType",
    "compute_block_hash_for_seq",
    "fetch_llm",
    "fetch_model",
    "lora_name_to_id",
    "make_engine",
    "register_llm",
    "register_model",
    "run_input",
    "run_kv_indexer",
    "run_select_service",
    "run_slot_tracker",
    "unregister_llm",
    "unregister_model",
    "update_model_taints",
)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room, known = _PLACES[name]
    value = globals()[name] = getattr(import_module(f"dynamo_es.{room}"), known)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

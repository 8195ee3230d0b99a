"""The public names of Dynamo's ``dynamo.llm`` that this version offers, from the rooms where they live.

A script moves over by changing the import root from ``dynamo`` to ``dynamo_es``.
"""

from dynamo_es.engines.mock.args import MockEngineArgs, ReasoningConfig, SglangArgs, TrtllmArgs
from dynamo_es.entrypoint.args import EngineType, EntrypointArgs
from dynamo_es.entrypoint.engine_config import make_engine
from dynamo_es.entrypoint.inputs import run_input
from dynamo_es.frontend.http_service import HttpAsyncEngine, HttpService
from dynamo_es.frontend.kserve.service import KserveGrpcService
from dynamo_es.frontend.python_engine import PythonAsyncEngine, RoutedEngine
from dynamo_es.frontend.route_extensions import FrontendExtensionContext, FrontendResponse, FrontendRoute
from dynamo_es.http_error import HttpError
from dynamo_es.models.deployment_card import ModelCardInstanceId
from dynamo_es.models.fetch import fetch_model
from dynamo_es.models.kinds import ModelInput, ModelType, WorkerType
from dynamo_es.models.lora import LoRADownloader
from dynamo_es.models.media_config import MediaDecoder, MediaFetcher
from dynamo_es.models.registration import register_model, unregister_model, update_model_taints
from dynamo_es.models.runtime_config import ModelRuntimeConfig
from dynamo_es.publishers.embedding_cache import MultimodalEmbeddingCachePublisher
from dynamo_es.publishers.forward_pass import FpmDirectPublisher
from dynamo_es.publishers.forward_pass_reader import FpmEventSubscriber
from dynamo_es.publishers.forward_pass_relay import FpmEventRelay
from dynamo_es.publishers.kv_events import KvEventPublisher
from dynamo_es.publishers.worker_metrics import WorkerMetricsPublisher
from dynamo_es.router.config import KvRouterConfig
from dynamo_es.router.config_aic import AicPerfConfig
from dynamo_es.router.config_routing import LoadThresholdConfig, RouterConfig
from dynamo_es.router.config_selection import SelectionCacheConfig
from dynamo_es.router.constraints import RoutingConstraints
from dynamo_es.router.errors import RouterQueueLimitExceeded
from dynamo_es.router.hashing import compute_block_hash_for_seq, lora_name_to_id
from dynamo_es.router.kv_router import KvRouter
from dynamo_es.router.modes import RouterMode
from dynamo_es.router.radix_tree import OverlapScores, RadixTree
from dynamo_es.router.selection_service import SelectionService
from dynamo_es.services.run import run_kv_indexer, run_select_service, run_slot_tracker

# Names of earlier versions of Dynamo.
fetch_llm = fetch_model
register_llm = register_model
unregister_llm = unregister_model

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

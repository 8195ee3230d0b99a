"""The public names of Dynamo's ``dynamo.llm`` that this version offers, from the rooms where they live.

A script moves over by changing the import root from ``dynamo`` to ``dynamo_es``.
"""

from dynamo_es.http_error import HttpError
from dynamo_es.publishers.forward_pass import FpmDirectPublisher
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

__all__ = (
    "AicPerfConfig",
    "FpmDirectPublisher",
    "HttpError",
    "KvEventPublisher",
    "KvRouter",
    "KvRouterConfig",
    "LoadThresholdConfig",
    "OverlapScores",
    "RadixTree",
    "RouterConfig",
    "RouterMode",
    "RouterQueueLimitExceeded",
    "RoutingConstraints",
    "SelectionCacheConfig",
    "SelectionService",
    "WorkerMetricsPublisher",
    "compute_block_hash_for_seq",
    "lora_name_to_id",
)

"""All topics of dynamo-es."""

from __future__ import annotations

from schemas.aggregates import AGGREGATES
from schemas.dc_relay import DC_RELAY
from schemas.dead_letters import DEAD_LETTERS
from schemas.embedding_cache import EMBEDDING_CACHE
from schemas.forward_pass import FORWARD_PASS
from schemas.kv_events import KV_EVENTS
from schemas.kv_snapshots import KV_SNAPSHOTS
from schemas.registry import REGISTRY
from schemas.requests import REQUESTS
from schemas.topic import TopicSpec
from schemas.worker_load import WORKER_LOAD

TOPICS: tuple[TopicSpec, ...] = (
    KV_EVENTS,
    KV_SNAPSHOTS,
    FORWARD_PASS,
    WORKER_LOAD,
    REGISTRY,
    REQUESTS,
    EMBEDDING_CACHE,
    AGGREGATES,
    DC_RELAY,
    DEAD_LETTERS,
)


def topic_spec(name: str) -> TopicSpec:
    """The topic called ``name`` (without namespace). Raises KeyError with the known names."""
    for spec in TOPICS:
        if spec.name == name:
            return spec
    raise KeyError(f"no topic {name!r}; there are {', '.join(spec.name for spec in TOPICS)}")

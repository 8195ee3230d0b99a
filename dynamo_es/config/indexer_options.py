"""The options of the indexer (``dynamo-es indexer``)."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_es.config.options import option
from dynamo_es.config.partition_list import parse_partitions
from schemas.kv_events import KV_EVENTS


def check_kv_event_partitions(text: str) -> None:
    """The check of the option."""
    parse_partitions(text, KV_EVENTS.partitions)


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """A process that keeps part of the KV index for routers with ``--use-remote-indexer``."""

    partitions: str | None = option(
        None, flag="--partitions", env="DYN_ES_INDEXER_PARTITIONS", check=check_kv_event_partitions,
        help="Partitions of topic kv-events that it keeps: 0-3,6; unset: indexers share them among each other.",
    )  # fmt: skip

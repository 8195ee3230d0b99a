"""Requests that the log needs and aiokafka has not, in the terms of its protocol package.

Metadata: aiokafka stops at version 5, which knows no topic ids, and its clients always let the broker create a topic
that is asked about. A topic id is the only thing that tells a topic from its successor of the same name.
IncrementalAlterConfigs: the older AlterConfigs, which aiokafka has, resets every setting that it does not name.
Source: Kafka's MetadataRequest.json, IncrementalAlterConfigsRequest.json and the responses beside them.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.metadata import MetadataRequest_v5
from aiokafka.protocol.types import (
    Array,
    Boolean,
    CompactArray,
    CompactString,
    Int8,
    Int16,
    Int32,
    Schema,
    String,
    TaggedFields,
)

TOPIC_RESOURCE = 2
_SET = 0
_NO_ID = uuid.UUID(int=0)


class Uuid(AbstractType[uuid.UUID]):  # type: ignore[misc]
    """16 bytes."""

    @classmethod
    def encode(cls, value: uuid.UUID) -> bytes:
        return value.bytes

    @classmethod
    def decode(cls, data: BytesIO) -> uuid.UUID:
        return uuid.UUID(bytes=data.read(16))


class MetadataResponse_v12(Response):  # type: ignore[misc] # noqa: N801
    """Version 12: topic ids, flexible encoding."""

    API_KEY = 3
    API_VERSION = 12
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32),
                ("host", CompactString("utf-8")),
                ("port", Int32),
                ("rack", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_id", CompactString("utf-8")),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("topic", CompactString("utf-8")),
                ("topic_id", Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class MetadataRequest_v12(RequestStruct):  # type: ignore[misc] # noqa: N801
    """Version 12 (Kafka 3.0 and later)."""

    API_KEY = 3
    API_VERSION = 12
    RESPONSE_TYPE = MetadataResponse_v12
    FLEXIBLE_VERSION = True
    SCHEMA = Schema(
        (
            "topics",
            CompactArray(("topic_id", Uuid), ("topic", CompactString("utf-8")), ("tags", TaggedFields)),
        ),
        ("allow_auto_topic_creation", Boolean),
        ("include_topic_authorized_operations", Boolean),
        ("tags", TaggedFields),
    )


class TopicMetadataRequest(Request[MetadataRequest_v5 | MetadataRequest_v12]):  # type: ignore[misc]
    """Metadata of some topics (None: of all), never creating one. Version 12, or 5 where the broker is older."""

    API_KEY = 3

    def __init__(self, topics: Sequence[str] | None) -> None:
        self._topics = topics

    def build(self, request_struct_class: type[Any]) -> Any:
        if request_struct_class.API_VERSION == MetadataRequest_v5.API_VERSION:
            return request_struct_class(None if self._topics is None else list(self._topics), False)
        topics: list[Any] | None = None
        if self._topics is not None:
            topics = [(_NO_ID, name, {}) for name in self._topics]
        return request_struct_class(topics, False, False, {})


class IncrementalAlterConfigsResponse_v0(Response):  # type: ignore[misc] # noqa: N801
    """One answer a resource."""

    API_KEY = 44
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "resources",
            Array(
                ("error_code", Int16),
                ("error_message", String("utf-8")),
                ("resource_type", Int8),
                ("resource_name", String("utf-8")),
            ),
        ),
    )


class IncrementalAlterConfigsRequest_v0(RequestStruct):  # type: ignore[misc] # noqa: N801
    """Version 0 (Kafka 2.3 and later)."""

    API_KEY = 44
    API_VERSION = 0
    RESPONSE_TYPE = IncrementalAlterConfigsResponse_v0
    SCHEMA = Schema(
        (
            "resources",
            Array(
                ("resource_type", Int8),
                ("resource_name", String("utf-8")),
                (
                    "configs",
                    Array(
                        ("name", String("utf-8")),
                        ("operation", Int8),
                        ("value", String("utf-8")),
                    ),
                ),
            ),
        ),
        ("validate_only", Boolean),
    )


class SetTopicConfigsRequest(Request[IncrementalAlterConfigsRequest_v0]):  # type: ignore[misc]
    """Set some settings of one topic; the others stay."""

    API_KEY = 44

    def __init__(self, topic: str, configs: Mapping[str, str]) -> None:
        self._topic = topic
        self._configs = [(name, _SET, value) for name, value in configs.items()]

    def build(self, request_struct_class: type[Any]) -> Any:
        return request_struct_class([(TOPIC_RESOURCE, self._topic, self._configs)], False)

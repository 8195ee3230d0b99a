"""A participant that knows only the published documents: another Kafka client, another MessagePack, no code of ours.

Values are laid out by ``prefixItems`` of the JSON Schema; topic, key, header and hashes are as the AsyncAPI document
says.
"""

from __future__ import annotations

import base64
import json
import struct
import time
from pathlib import Path
from typing import Any

import jsonschema
import msgpack
import xxhash
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

DOCUMENTS = Path(__file__).parents[2] / "schemas"
ASYNCAPI = json.loads((DOCUMENTS / "asyncapi.json").read_text())


class ForeignSchema:
    """One topic's JSON Schema, and values by field name."""

    def __init__(self, topic: str) -> None:
        self.document = json.loads((DOCUMENTS / "json" / f"{topic}.schema.json").read_text())
        self._validator = jsonschema.Draft202012Validator(self.document)

    def pack(self, name: str, **fields: Any) -> bytes:
        """MessagePack of the definition ``name``; a nested value is ``(name, fields)``."""
        return msgpack.packb(self._lay_out(name, fields), use_bin_type=True)

    def unpack(self, data: bytes) -> dict[str, Any]:
        """Fields by name, the tag as ``type``; AssertionError unless the schema admits them."""
        raw = msgpack.unpackb(data, raw=False, strict_map_key=False)
        self._validator.validate(_in_json(raw))
        return self._named(raw)

    def _lay_out(self, name: str, fields: dict[str, Any]) -> list[Any]:
        items = self.document["$defs"][name]["prefixItems"]
        value = [item["const"] if "const" in item else fields[item["title"]] for item in items]
        return [
            [self._lay_out(*part) for part in item] if isinstance(item, list) and item and isinstance(item[0], tuple)
            else item
            for item in value
        ]  # fmt: skip

    def _named(self, raw: list[Any]) -> dict[str, Any]:
        for definition in self.document["$defs"].values():
            items = definition.get("prefixItems", ())
            if items and items[0].get("const") == raw[0]:
                return {
                    item["title"]: [self._named(part) for part in value] if self._is_tagged_list(value) else value
                    for item, value in zip(items, raw, strict=False)
                }
        raise AssertionError(f"no definition has the tag {raw[0]!r}")

    def _is_tagged_list(self, value: Any) -> bool:
        tags = {items[0].get("const") for d in self.document["$defs"].values() if (items := d.get("prefixItems"))}
        return isinstance(value, list) and bool(value) and isinstance(value[0], list) and value[0][0] in tags


def _in_json(value: Any) -> Any:
    """The JSON form that the schema describes: bytes as base64."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, list):
        return [_in_json(item) for item in value]
    if isinstance(value, dict):
        return {key: _in_json(item) for key, item in value.items()}
    return value


def topic_name(topic: str, namespace: str) -> str:
    """Full name, from the channel's address."""
    address: str = ASYNCAPI["channels"][topic]["address"]
    return address.replace("{namespace}", namespace)


def header_of(message: str) -> list[tuple[str, bytes]]:
    """Headers of a message type."""
    properties = ASYNCAPI["components"]["messages"][message]["headers"]["properties"]
    return [(name, item["const"].encode("ascii")) for name, item in properties.items()]


def hashes_of(tokens: list[int], block_size: int) -> tuple[list[int], list[int]]:
    """Tokens hashes and sequence hashes of the complete blocks, as the document's section on hashes says."""
    blocks = [tokens[start : start + block_size] for start in range(0, len(tokens), block_size)]
    tokens_hashes = [
        xxhash.xxh3_64_intdigest(struct.pack(f"<{block_size}I", *block), 1337)
        for block in blocks
        if len(block) == block_size
    ]
    sequence_hashes: list[int] = []
    for tokens_hash in tokens_hashes:
        if sequence_hashes:
            pair = struct.pack("<QQ", sequence_hashes[-1], tokens_hash)
            sequence_hashes.append(xxhash.xxh3_64_intdigest(pair, 1337))
        else:
            sequence_hashes.append(tokens_hash)
    return tokens_hashes, sequence_hashes


def column(values: list[int]) -> bytes:
    """A packed column."""
    return struct.pack(f"<{len(values)}Q", *values)


class ForeignProducer:
    """librdkafka's producer with the partitioner that the document asks for. Blocks."""

    def __init__(self, servers: str, **settings: Any) -> None:
        self._producer = Producer(
            {"bootstrap.servers": servers, "partitioner": "murmur2", "enable.idempotence": True, **settings}
        )
        if "transactional.id" in settings:
            self._producer.init_transactions(20)

    def send(self, topic: str, key: bytes, value: bytes | None, headers: list[tuple[str, bytes]] | None = None) -> int:
        """The partition that it went to, once it is durable."""
        landed: list[Any] = []

        def delivered(error: Any, message: Any) -> None:
            landed.append(error if error is not None else message.partition())

        self._producer.produce(topic, value=value, key=key, headers=headers or [], on_delivery=delivered)
        assert self._producer.flush(20) == 0
        assert isinstance(landed[0], int), landed[0]
        return landed[0]

    def begin(self) -> None:
        """Begin a transaction."""
        self._producer.begin_transaction()

    def commit(self) -> None:
        """Commit it."""
        self._producer.commit_transaction(20)


def read_topic(servers: str, topic: str, enough: Any, timeout_s: float = 20.0) -> list[Any]:
    """Messages of all partitions from the start, with ``assign`` and no group offsets, until ``enough(messages)``."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "unused: nothing is committed",
            "enable.auto.commit": False,
            "enable.partition.eof": False,
            "isolation.level": "read_committed",
        }
    )
    try:
        partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
        consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
        messages: list[Any] = []
        deadline = time.monotonic() + timeout_s
        while not enough(messages):
            assert time.monotonic() < deadline, f"{len(messages)} messages of {topic} after {timeout_s:g} s"
            message = consumer.poll(0.2)
            if message is None:
                continue
            if message.error() is not None:
                assert message.error().code() in (KafkaError._PARTITION_EOF, KafkaError._ALL_BROKERS_DOWN)
                continue
            messages.append(message)
        return messages
    finally:
        consumer.close()

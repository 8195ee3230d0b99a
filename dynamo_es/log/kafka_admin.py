"""Questions and orders to a Kafka cluster that are no record: topics, their settings, offsets, trimming.

Built on aiokafka's ``AIOKafkaClient``, its connection layer: the admin client above it is declared experimental, lets
the broker create any topic that is asked about, and knows neither topic ids nor offsets.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from aiokafka import errors as kafka
from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.admin import CreateTopicsRequest, DeleteRecordsRequest, DescribeConfigsRequest
from aiokafka.protocol.offset import OffsetRequest

from dynamo_es.log.base import RECORD_OVERHEAD_BYTES, TopicConfig, TopicPartition
from dynamo_es.log.errors import LogClosed, LogError, LogUnavailable, UnknownTopic
from dynamo_es.log.kafka_clients import KafkaClients, stop_client
from dynamo_es.log.kafka_errors import map_kafka_error, raise_for_code
from dynamo_es.log.kafka_protocol import TOPIC_RESOURCE, SetTopicConfigsRequest, TopicMetadataRequest

_T = TypeVar("_T")

EARLIEST = -2
LATEST = -1
READ_UNCOMMITTED = 0
READ_COMMITTED = 1
_RETRY_PAUSE_S = 0.1
# Where all brokers are asked, one that hangs is not waited for.
_NODE_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """A topic as the cluster's metadata tells it. ``leaders``: node by partition, -1 while there is none."""

    name: str
    topic_id: str
    leaders: Mapping[int, int]
    replication: int
    internal: bool


class KafkaAdmin:
    """Belongs to one event loop. Every call retries what can be retried until ``request_timeout_ms`` is over.

    Raises, from every call: ``LogUnavailable`` when no broker answers in that time, ``LogClosed`` after ``close``,
    ``LogError`` when the cluster refuses; the message says what to do.
    """

    def __init__(self, clients: KafkaClients) -> None:
        self._clients = clients
        self._timeout_ms = clients.settings.request_timeout_ms
        self._timeout_s = self._timeout_ms / 1000
        self._client: AIOKafkaClient | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    async def cluster_id(self) -> str:
        """The cluster's own id; it survives every restart."""
        response = await self._call("ask for the cluster id", lambda client: self._metadata(client, []))
        return str(response.cluster_id)

    async def topics(self, names: Sequence[str] | None) -> Mapping[str, TopicFacts]:
        """Facts about the topics of these names (None: all) that exist: that any broker knows."""

        return await self._call("list topics", lambda client: self._known(client, names))

    async def topic(self, name: str) -> TopicFacts:
        """Facts about one topic. Raises ``UnknownTopic``."""
        facts = (await self.topics([name])).get(name)
        if facts is None:
            raise UnknownTopic(name)
        return facts

    async def create(self, topics: Sequence[TopicConfig]) -> None:
        """Create topics and wait until their leaders take requests. One that is there already is left alone."""
        if not topics:
            return
        orders: list[tuple[Any, ...]] = [
            (
                item.name,
                item.partitions,
                -1 if item.replication is None else item.replication,
                [],
                list(topic_settings(item).items()),
            )
            for item in topics
        ]

        async def order(client: AIOKafkaClient) -> None:
            controller = (await self._metadata(client, [])).controller_id
            request = CreateTopicsRequest(orders, self._timeout_ms, False)
            response = await client.send(controller, request)
            for name, code, message in response.topic_errors:
                if kafka.for_code(code) is not kafka.TopicAlreadyExistsError:
                    raise_for_code(code, f"topic {name!r}: {message}")

        names = [item.name for item in topics]
        await self._call(f"create topics {', '.join(names)}", order)
        await self._call(f"find leaders for topics {', '.join(names)}", lambda client: self._check_led(client, names))
        # A broker learns a moment later than the controller what it leads, and refuses appends until then.
        found = await self.topics(names)
        await self.offsets({TopicPartition(name, part): LATEST for name in found for part in found[name].leaders})

    async def configs(self, topic: str) -> Mapping[str, str]:
        """The settings of a topic. Raises ``UnknownTopic``."""

        async def ask(client: AIOKafkaClient) -> dict[str, str]:
            request = DescribeConfigsRequest([(TOPIC_RESOURCE, topic, None)], False)
            response = await client.send(client.get_random_node(), request)
            ((code, message, _, _, entries),) = response.resources
            raise_for_code(code, f"topic {topic!r}: {message}")
            return {entry[0]: entry[1] or "" for entry in entries}

        return await self._call(f"read the settings of topic {topic!r}", ask, topic=topic)

    async def alter(self, topic: TopicConfig) -> None:
        """Set what ``topic_settings`` says; other settings stay. Raises ``UnknownTopic``."""

        async def order(client: AIOKafkaClient) -> None:
            controller = (await self._metadata(client, [])).controller_id
            response = await client.send(controller, SetTopicConfigsRequest(topic.name, topic_settings(topic)))
            ((code, message, _, _),) = response.resources
            raise_for_code(code, f"topic {topic.name!r}: {message}")

        await self._call(f"change the settings of topic {topic.name!r}", order, topic=topic.name)

    async def offsets(
        self, positions: Mapping[TopicPartition, int], isolation: int = READ_UNCOMMITTED
    ) -> Mapping[TopicPartition, int]:
        """Offset by partition: the first whose time is at least the given one in ms, -1 if there is none.

        Instead of a time, ``EARLIEST`` asks for the start and ``LATEST`` for the end; with ``READ_COMMITTED`` the end
        is the start of the first open transaction. Raises ``UnknownTopic``, also for a missing partition.
        """
        topics = sorted({position.topic for position in positions})

        async def ask(client: AIOKafkaClient) -> dict[TopicPartition, int]:
            by_node = await self._by_leader(client, positions)
            answers = [client.send(node, OffsetRequest(-1, isolation, wanted)) for node, wanted in by_node.items()]
            found: dict[TopicPartition, int] = {}
            for response in await asyncio.gather(*answers):
                for topic, partitions in response.topics:
                    for partition, code, _, offset in partitions:
                        raise_for_code(code, f"{topic}[{partition}]")
                        found[TopicPartition(topic, partition)] = offset
            return found

        return await self._call(f"ask for offsets of {', '.join(topics)}", ask) if positions else {}

    async def delete_records(self, position: TopicPartition, before_offset: int) -> int:
        """Drop what is below ``before_offset``; the new start. Raises ``UnknownTopic``."""

        async def order(client: AIOKafkaClient) -> int:
            ((node, wanted),) = (await self._by_leader(client, {position: before_offset})).items()
            response = await client.send(node, DeleteRecordsRequest(wanted, self._timeout_ms))
            ((_, ((_, low_watermark, code, *_), *_), *_),) = response.topics
            raise_for_code(code, f"{position.topic}[{position.partition}]")
            return int(low_watermark)

        return await self._call(f"trim {position.topic}[{position.partition}]", order, topic=position.topic)

    async def ailment(self, topic: str) -> str:
        """What is wrong with the replicas of a topic, as far as the cluster tells at once; empty if it tells nothing.

        Never raises: it explains an error that there is already.
        """
        client = self._client
        if client is None:
            return ""
        known = [broker.nodeId for broker in client.cluster.brokers()]
        try:
            answers = await asyncio.gather(*(self._ask_node(client, node, [topic]) for node in known))
        except kafka.KafkaError:
            return ""
        answering = {node: answer for node, answer in zip(known, answers, strict=True) if answer is not None}
        for answer in answering.values():
            for found in answer.to_object()["topics"]:
                return _tell_replicas(found["partitions"], answering)
        return ""

    async def close(self) -> None:
        """Safe to call twice."""
        self._closed = True
        await self._drop()

    async def _call(self, action: str, ask: Callable[[AIOKafkaClient], Awaitable[_T]], topic: str | None = None) -> _T:
        action = f"{action} at {self._clients.settings.bootstrap}"
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        while True:
            client = await self._connected(action)
            try:
                async with asyncio.timeout_at(deadline):
                    return await ask(client)
            except TimeoutError as error:
                await self._drop()
                raise LogUnavailable(f"cannot {action}: no answer within {self._timeout_s:g} s") from error
            except NotImplementedError as error:  # aiokafka's word for no version of the request in common
                raise LogError(f"cannot {action}: {error}; brokers and aiokafka share no version") from error
            except kafka.KafkaError as error:
                mapped = map_kafka_error(error, action, topic=topic)
                if not mapped.retriable:
                    raise mapped from error
                if loop.time() + _RETRY_PAUSE_S >= deadline:
                    await self._drop()
                    raise mapped from error
            await asyncio.sleep(_RETRY_PAUSE_S)

    async def _connected(self, action: str) -> AIOKafkaClient:
        async with self._connecting:
            if self._client is None and not self._closed:
                self._client = await self._clients.client()
            if self._closed:
                await self._drop()
                raise LogClosed(f"cannot {action}: the log was closed")
            return self._client

    async def _drop(self) -> None:
        """Forget the client: a new one finds brokers by the configured servers, wherever they moved meanwhile."""
        client, self._client = self._client, None
        if client is not None:
            await stop_client(client)

    async def _metadata(self, client: AIOKafkaClient, names: Sequence[str] | None) -> Any:
        """What any one broker tells. One that hangs is given up early enough to ask another."""
        try:
            async with asyncio.timeout(self._timeout_s / 4):
                return await client.send(client.get_random_node(), TopicMetadataRequest(names))
        except TimeoutError as error:
            raise kafka.RequestTimedOutError("a broker does not answer") from error

    async def _known(self, client: AIOKafkaClient, names: Sequence[str] | None) -> dict[str, TopicFacts]:
        found = _facts_in(await self._metadata(client, names))
        if names is not None and not found.keys() >= set(names):
            for response in await self._metadata_of_all(client, names):
                found = _facts_in(response) | found
        return found

    async def _metadata_of_all(self, client: AIOKafkaClient, names: Sequence[str]) -> Sequence[Any]:
        """The answers of all brokers that answer: each learns of new topics in its own time."""
        nodes = [broker["node_id"] for broker in (await self._metadata(client, [])).to_object()["brokers"]]
        answers = await asyncio.gather(*(self._ask_node(client, node, names) for node in nodes))
        return [answer for answer in answers if answer is not None]

    @staticmethod
    async def _ask_node(client: AIOKafkaClient, node: int, names: Sequence[str]) -> Any:
        """What this broker tells of the topics; None if it does not answer."""
        try:
            async with asyncio.timeout(_NODE_TIMEOUT_S):
                return await client.send(node, TopicMetadataRequest(names))
        except (TimeoutError, kafka.KafkaError) as error:
            if isinstance(error, kafka.KafkaError) and not error.retriable:
                raise
            return None

    async def _check_led(self, client: AIOKafkaClient, names: Sequence[str]) -> None:
        answers = await self._metadata_of_all(client, names)
        led = [{item["topic"] for item in response.to_object()["topics"] if _is_led(item)} for response in answers]
        if missing := [name for name in names if not led or any(name not in told for told in led)]:
            raise kafka.LeaderNotAvailableError(f"topics {', '.join(missing)} have partitions without a leader")

    async def _by_leader(
        self, client: AIOKafkaClient, values: Mapping[TopicPartition, int]
    ) -> Mapping[int, list[tuple[str, list[tuple[int, int]]]]]:
        """``values`` as requests carry them, by the node that leads each partition."""
        names = sorted({position.topic for position in values})
        facts = await self._known(client, names)
        by_node: dict[int, dict[str, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        for position, value in values.items():
            topic = facts.get(position.topic)
            if topic is None or position.partition not in topic.leaders:
                raise UnknownTopic(position.topic)
            leader = topic.leaders[position.partition]
            if leader < 0:
                raise kafka.LeaderNotAvailableError(f"{position.topic}[{position.partition}] has no leader")
            by_node[leader][position.topic].append((position.partition, value))
        return {node: list(topics.items()) for node, topics in by_node.items()}


def _facts_in(response: Any) -> dict[str, TopicFacts]:
    return {facts.name: facts for facts in map(_topic_facts, response.to_object()["topics"]) if facts}


def _topic_facts(item: Mapping[str, Any]) -> TopicFacts | None:
    if kafka.for_code(item["error_code"]) is kafka.UnknownTopicOrPartitionError:
        return None
    if kafka.for_code(item["error_code"]) is not kafka.LeaderNotAvailableError:
        raise_for_code(item["error_code"], f"topic {item['topic']!r}")
    partitions = item["partitions"]
    # Brokers before Kafka 3.0 tell no id; the name is at least stable.
    topic_id = item["topic_id"].hex if "topic_id" in item else item["topic"]
    leaders = {partition["partition"]: partition["leader"] for partition in partitions}
    replication = min((len(partition["replicas"]) for partition in partitions), default=0)
    return TopicFacts(item["topic"], topic_id, leaders, replication, item["is_internal"])


def _tell_replicas(partitions: Sequence[Mapping[str, Any]], answering: Collection[int]) -> str:
    """``partitions`` as a metadata response has them, ``answering``: nodes that do."""
    told = []
    if silent := sorted({node for item in partitions for node in item["replicas"]}.difference(answering)):
        told.append(f"brokers with its replicas that do not answer: {', '.join(map(str, silent))}")
    if leaderless := sorted(item["partition"] for item in partitions if item["leader"] < 0):
        told.append(f"partitions without a leader: {', '.join(map(str, leaderless))}")
    lacking = [item for item in partitions if len(item["isr"]) < len(item["replicas"])]
    if lacking:
        fewest, copies = min((len(item["isr"]), len(item["replicas"])) for item in lacking)
        numbers = ", ".join(map(str, sorted(item["partition"] for item in lacking)))
        told.append(
            f"partitions with replicas that are not in sync: {numbers} (down to {fewest} of {copies}; appends need "
            "min.insync.replicas)"
        )
    return "; ".join(told)


def _is_led(item: Mapping[str, Any]) -> bool:
    return item["error_code"] == 0 and all(partition["leader"] >= 0 for partition in item["partitions"])


def topic_settings(topic: TopicConfig) -> dict[str, str]:
    """What a topic is told at its making and by ``alter``, in Kafka's names."""
    settings = {"max.message.bytes": str(topic.max_record_bytes + RECORD_OVERHEAD_BYTES)}
    if topic.min_insync_replicas is not None:
        settings["min.insync.replicas"] = str(topic.min_insync_replicas)
    if topic.compacted:
        settings["cleanup.policy"] = "compact"
    else:
        settings["cleanup.policy"] = "delete"
        # Said also when it is "for ever": a broker's own default (seven days) must not decide about it.
        settings["retention.ms"] = str(-1 if topic.retention_ms is None else topic.retention_ms)
    return settings

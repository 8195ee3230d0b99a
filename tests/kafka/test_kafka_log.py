from __future__ import annotations

import asyncio
import itertools
import uuid

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions

from dynamo_es.clock import SystemClock
from dynamo_es.errors import InvalidArgument
from dynamo_es.log.base import Bounds, Entry, Position, TopicConfig, TopicPartition
from dynamo_es.log.errors import LogError, LogUnavailable, TopicMismatch, UnknownTopic
from dynamo_es.log.kafka_admin import KafkaAdmin
from dynamo_es.log.kafka_clients import KafkaClients
from dynamo_es.log.kafka_config import KafkaSettings
from dynamo_es.log.open import open_log
from tests.contract.log_suite import DEADLINE_S, MURMUR2, EventLogSuite, from_start, kafka_partition, read, read_to_end

pytestmark = pytest.mark.kafka


class TestKafkaLog(EventLogSuite):
    supports_retention = False
    # The brokers' work. Taken out, since a Kafka test that skips has failed in CI.
    test_retention_drops_what_is_old_and_keeps_what_is_not = None
    test_compaction_keeps_the_newest_of_each_key = None

    @pytest.fixture
    def place(self, kafka_bootstrap):
        return f"kafka://{kafka_bootstrap}"

    async def open(self, place):
        log = open_log(place, SystemClock())
        await log.start()
        return log

    async def delete_topic(self, log, place, topic):
        await delete_topic(place.removeprefix("kafka://"), topic)


@pytest.fixture
async def log(open_kafka, kafka_bootstrap):
    return await open_kafka(kafka_bootstrap)


async def make_topic(log, partitions=1, **settings):
    name = f"kafka.{uuid.uuid4().hex}"
    await log.create_topics([TopicConfig(name, partitions, replication=1, **settings)])
    return name


async def delete_topic(bootstrap, name):
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    await admin.delete_topics([name])
    await admin.close()


async def test_a_foreign_producer_and_ours_agree_on_the_partition_of_a_key(log, kafka_bootstrap):
    topic = await make_topic(log, 12)
    foreign = AIOKafkaProducer(bootstrap_servers=kafka_bootstrap)
    await foreign.start()
    for number, key in enumerate(itertools.chain(MURMUR2, MURMUR2)):
        theirs = await foreign.send_and_wait(topic, b"t%d" % number, key=key)
        ours = await log.append(topic, Entry(b"o%d" % number, key))
        assert theirs.partition == ours.partition == kafka_partition(key, 12)
    await foreign.stop()
    values = {}
    for record in await read(log.reader(from_start(topic, 12)), 4 * len(MURMUR2)):
        values.setdefault(record.key, []).append(record.value)
    for number, key in enumerate(MURMUR2):
        again = number + len(MURMUR2)
        assert values[key] == [b"t%d" % number, b"o%d" % number, b"t%d" % again, b"o%d" % again]


async def test_a_plain_kafka_consumer_reads_what_we_append(log, kafka_bootstrap):
    topic = await make_topic(log)
    await log.append(topic, Entry(b"value", b"key", (("schema", b"x/1"),), 1_790_000_000_000))
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka_bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    consumer.assign([KafkaPartition(topic, 0)])
    await consumer.seek_to_beginning()
    record = await asyncio.wait_for(consumer.getone(), DEADLINE_S)
    await consumer.stop()
    assert (record.key, record.value, record.headers) == (b"key", b"value", (("schema", b"x/1"),))
    assert record.timestamp == 1_790_000_000_000


async def test_aborted_transactions_are_never_seen_and_do_not_stop_a_reader(log, kafka_bootstrap):
    topic = await make_topic(log)
    producer = AIOKafkaProducer(bootstrap_servers=kafka_bootstrap, transactional_id=uuid.uuid4().hex)
    await producer.start()
    reader = log.reader(from_start(topic, 1))
    await producer.begin_transaction()
    await producer.send_and_wait(topic, b"aborted")
    assert await reader.poll(timeout_s=0.3) == {}
    await producer.abort_transaction()
    async with producer.transaction():
        await producer.send_and_wait(topic, b"committed")
        assert await reader.poll(timeout_s=0) == {}
    await producer.stop()
    await log.append(topic, Entry(b"plain"))
    records = await read_to_end(log, reader, topic)
    assert [(record.offset, record.value) for record in records] == [(2, b"committed"), (4, b"plain")]


async def test_the_end_is_reached_behind_an_aborted_transaction(log, kafka_bootstrap):
    topic = await make_topic(log)
    producer = AIOKafkaProducer(bootstrap_servers=kafka_bootstrap, transactional_id=uuid.uuid4().hex)
    await producer.start()
    await producer.begin_transaction()
    await producer.send_and_wait(topic, b"aborted")
    await producer.abort_transaction()
    await producer.stop()
    reader = log.reader(from_start(topic, 1))
    assert await read_to_end(log, reader, topic) == []
    assert reader.positions() == {TopicPartition(topic, 0): 2}


async def test_a_poll_that_does_not_wait_still_sees_what_is_there(log):
    topic = await make_topic(log, 3)
    await log.append_all(topic, [Entry(b"v", partition=number) for number in range(3)])
    reader = log.reader(from_start(topic, 3))
    seen = 0
    while batch := await reader.poll(timeout_s=0):
        seen += sum(map(len, batch.values()))
    assert seen == 3


async def test_describe_tells_kafkas_own_settings(log):
    name = await make_topic(log, 2, retention_ms=3_600_000, max_record_bytes=50_000)
    found = await log.describe(name)
    assert (found.partitions, found.compacted, found.retention_ms) == (2, False, 3_600_000)
    assert (found.replication, found.min_insync_replicas, found.max_record_bytes) == (1, 1, 50_000)
    forever = await log.describe(await make_topic(log))
    assert (forever.compacted, forever.retention_ms) == (False, None)
    compacted = await log.describe(await make_topic(log, compacted=True))
    assert (compacted.compacted, compacted.retention_ms) == (True, None)


async def test_EVT_08_a_topic_made_anew_has_another_id(log, kafka_bootstrap):
    topic = await make_topic(log)
    before = (await log.describe(topic)).topic_id
    await log.append(topic, Entry(b"old"))
    await delete_topic(kafka_bootstrap, topic)
    deadline = asyncio.get_running_loop().time() + DEADLINE_S
    while topic in await log.list_topics():
        assert asyncio.get_running_loop().time() < deadline
    await log.create_topics([TopicConfig(topic, 1, replication=1)])
    assert (await log.describe(topic)).topic_id != before
    assert await log.bounds(topic) == {0: Bounds(0, 0)}


async def test_EVT_16_partitions_added_to_a_topic_in_use_do_not_move_its_keys(log, open_kafka, kafka_bootstrap):
    topic = await make_topic(log, 4)
    await log.append(topic, Entry(b"v", b"abc"))
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka_bootstrap)
    await admin.start()
    await admin.create_partitions({topic: NewPartitions(12)})
    await admin.close()
    # A new producer, as after an outage, knows all twelve.
    log._appender._retire(log._appender._slot)
    for key in MURMUR2:
        assert (await log.append(topic, Entry(b"v", key))).partition == kafka_partition(key, 4)
    with pytest.raises(TopicMismatch, match="has 12 partitions, the configuration says 4"):
        await (await open_kafka(kafka_bootstrap)).create_topics([TopicConfig(topic, 4, replication=1)])


async def test_EVT_14_a_consumer_that_delivers_nothing_is_replaced(log):
    topic = await make_topic(log)
    reader = log.reader(from_start(topic, 1))
    await log.append(topic, Entry(b"first"))
    await read(reader, 1)
    # What is left of aiokafka's consumer when its fetching task has died.
    reader._consumer._fetcher._fetch_task.cancel()
    await log.append(topic, Entry(b"second"))
    with pytest.raises(LogUnavailable, match="do not arrive"):
        await asyncio.wait_for(reader.poll(), DEADLINE_S)
    assert reader.positions() == {TopicPartition(topic, 0): 1}
    assert [record.value for record in await read(reader, 1)] == [b"second"]
    assert reader.replaced_consumers == 1


async def test_asking_about_a_topic_never_creates_it(log, kafka_bootstrap):
    missing = f"kafka.{uuid.uuid4().hex}"
    reader = log.reader(from_start(missing, 1))
    with pytest.raises(UnknownTopic):
        await reader.poll()
    for call in (log.append(missing, Entry(b"v")), log.describe(missing), log.trim(TopicPartition(missing, 0), 5)):
        with pytest.raises(UnknownTopic):
            await call
    with pytest.raises(UnknownTopic):
        await log.offset_at(TopicPartition(missing, 0), 0)
    assert missing not in await log.list_topics()


async def test_a_partition_that_is_not_there_is_named(log):
    topic = await make_topic(log, 2)
    with pytest.raises(InvalidArgument, match="partitions 0 to 1, not 2"):
        await log.append(topic, Entry(b"v", partition=2))
    with pytest.raises(InvalidArgument, match="partitions 0 to 1, not 7"):
        await log.reader({TopicPartition(topic, 7): 0}).poll()
    with pytest.raises(InvalidArgument, match="without key and value"):
        await log.append(topic, Entry(None))


async def test_the_record_limit_is_exact_also_in_batches(log):
    """Kafka bounds batches: records that are each within the limit must not be refused together."""
    topic = await make_topic(log, max_record_bytes=2_000)
    positions = await log.append_all(topic, [Entry(b"x" * 1_990, b"k" * 10) for _ in range(20)])
    more = await asyncio.gather(*(log.append(topic, Entry(b"y" * 1_000)) for _ in range(20)))
    assert sorted([*positions, *more]) == [Position(topic, 0, number) for number in range(40)]


async def test_a_trim_of_a_compacted_topic_drops_nothing(log):
    topic = await make_topic(log, compacted=True)
    await log.append_all(topic, [Entry(b"v", b"k")] * 5)
    assert await log.trim(TopicPartition(topic, 0), 3) == 0
    assert await log.bounds(topic) == {0: Bounds(0, 5)}


async def test_a_time_that_the_broker_refuses_says_so_and_does_not_spoil_later_appends(log):
    topic = await make_topic(log)
    ahead = SystemClock().now_ms() + 48 * 3_600_000
    with pytest.raises(LogError, match="check the machine's clock") as caught:
        await log.append(topic, Entry(b"v", timestamp_ms=ahead))
    assert not caught.value.retriable
    for number in range(3):
        assert await log.append(topic, Entry(b"v")) == Position(topic, 0, number)


async def test_a_replication_that_the_cluster_cannot_give_says_so(log):
    with pytest.raises(LogError, match="number of running brokers") as caught:
        await log.create_topics([TopicConfig(f"kafka.{uuid.uuid4().hex}", 1, replication=3)])
    assert not caught.value.retriable


async def test_metadata_of_brokers_without_topic_ids_is_understood(kafka_bootstrap, log, monkeypatch):
    """Brokers before Kafka 3.0, and some that speak its protocol, end at an older version of the request."""
    from aiokafka.conn import AIOKafkaConnection

    topic = await make_topic(log, 3)
    look_up = AIOKafkaConnection._do_version_lookup

    async def old_broker(self):
        await look_up(self)
        self._versions[3] = (0, 8)

    monkeypatch.setattr(AIOKafkaConnection, "_do_version_lookup", old_broker)
    admin = KafkaAdmin(KafkaClients(KafkaSettings((kafka_bootstrap,))))
    facts = await admin.topic(topic)
    assert (facts.topic_id, sorted(facts.leaders), facts.replication) == (topic, [0, 1, 2], 1)
    assert await admin.cluster_id() == log.log_id
    assert f"{topic}x" not in await admin.topics([f"{topic}x"])
    await admin.close()

"""Making and ending aiokafka's objects: connect within a bound, explain why not, stop without hanging.

This is the only module that touches aiokafka's private parts, in ``_settle``, ``_close_left_open`` and the
``_force_...`` functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import errors as kafka
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import AIOKafkaConnection

from dynamo_es.errors import ConfigError
from dynamo_es.log.errors import LogUnavailable
from dynamo_es.log.kafka_config import OAUTHBEARER, KafkaSettings
from dynamo_es.log.kafka_credentials import client_arguments
from dynamo_es.log.kafka_errors import map_kafka_error
from dynamo_es.log.kafka_logging import quiet_aiokafka
from dynamo_es.log.kafka_refusals import explain_refusal
from dynamo_es.log.kafka_tokens import build_tokens

# Bytes of records that a partition sends in one request. Larger batches append faster, smaller ones hold less memory:
# aiokafka keeps at most two batches a partition.
BATCH_BYTES = 262_144
# One fetch answer; with the answer in flight it bounds a reader's memory. A larger record is still returned.
FETCH_MAX_BYTES = 16 * 1024 * 1024
FETCH_MAX_PARTITION_BYTES = 1024 * 1024
# The broker answers a fetch as soon as one record is there, so this is no latency: it only paces idle requests.
FETCH_WAIT_MS = 500
# The real bound is the topic's; the brokers' own (socket.request.max.bytes) is 100 MiB.
MAX_REQUEST_BYTES = 100 * 1024 * 1024 - 65_536
STOP_TIMEOUT_S = 2.0
# A fetch is the longest request.
SETTLE_S = 2 * FETCH_WAIT_MS / 1000
_LOOK_S = 0.01


class KafkaClients:
    """Makes connected aiokafka objects for one cluster. Belongs to one event loop.

    Every ``async`` method raises ``LogUnavailable`` when no broker answers within ``connect_timeout_ms`` and
    ``LogError`` when the brokers refuse the login or cannot be trusted; all messages name the servers and what to do.
    The first one also raises ``ConfigError`` for files of certificates and secrets that cannot be used.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        self.settings = settings
        self._tokens = build_tokens(settings) if settings.sasl_mechanism == OAUTHBEARER else None
        self._arguments: dict[str, Any] | None = None

    async def client(self) -> AIOKafkaClient:
        """The bare connection layer."""
        client = AIOKafkaClient(**await self._common())
        await self._start(partial(_bootstrap, client), client.close)
        return client

    async def producer(self) -> AIOKafkaProducer:
        """An idempotent producer that waits for all in-sync replicas."""
        producer = AIOKafkaProducer(
            **await self._common(),
            acks="all",
            enable_idempotence=True,
            linger_ms=self.settings.linger_ms,
            max_batch_size=BATCH_BYTES,
            max_request_size=MAX_REQUEST_BYTES,
        )
        await self._start(producer.start, producer.stop)
        return producer

    async def consumer(self) -> AIOKafkaConsumer:
        """A consumer without group and without assignment, that sees committed records only and never jumps."""
        consumer = AIOKafkaConsumer(
            **await self._common(),
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_committed",
            fetch_min_bytes=1,
            fetch_max_wait_ms=FETCH_WAIT_MS,
            fetch_max_bytes=FETCH_MAX_BYTES,
            max_partition_fetch_bytes=FETCH_MAX_PARTITION_BYTES,
            client_rack=self.settings.client_rack,
        )
        await self._start(consumer.start, consumer.stop)
        return consumer

    async def _common(self) -> dict[str, Any]:
        self._arguments = await self._read_arguments()
        servers = await _answering_first(self.settings.servers, self.settings.connect_timeout_ms / 1000)
        return self._arguments | {"bootstrap_servers": servers}

    async def _read_arguments(self) -> dict[str, Any]:
        """Secrets and certificates as they are now: they may have been renewed since the last client was made."""
        try:
            return await asyncio.to_thread(client_arguments, self.settings, self._tokens)
        except ConfigError as error:
            if self._arguments is None:
                raise
            # They could be read before, so somebody is just at them.
            raise LogUnavailable(f"cannot connect to Kafka at {self.settings.bootstrap}: {error}") from error

    async def _start(self, start: Callable[[], Awaitable[None]], stop: Callable[[], Awaitable[None]]) -> None:
        try:
            with quiet_aiokafka():
                async with asyncio.timeout(self.settings.connect_timeout_ms / 1000):
                    await start()
        except (TimeoutError, OSError, kafka.KafkaError) as error:
            await _close_left_open(error)
            await stop()
            if isinstance(error, kafka.ClusterAuthorizationFailedError):
                # What a producer is told whose principal may write nowhere.
                raise map_kafka_error(error, f"append at {self.settings.bootstrap}") from error
            raise await explain_refusal(self.settings, self._arguments or {}) from error
        except BaseException as error:
            await _close_left_open(error)
            await stop()
            raise


async def _close_left_open(error: BaseException | None) -> None:
    """aiokafka forgets the connection over which it asks for the brokers if it is cancelled meanwhile, as by a timeout.

    It would stay open for as long as anybody keeps the error, and whatever asks for it then complains.
    """
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            left = frame.f_locals.get("bootstrap_conn")
            if isinstance(left, AIOKafkaConnection) and left.connected():
                await left.close()
        error = error.__cause__ or error.__context__


async def _bootstrap(client: AIOKafkaClient) -> None:
    """A broker that refused a bearer token, which aiokafka does not notice, answers with a cluster of no brokers."""
    await client.bootstrap()
    if not client.cluster.brokers():
        raise kafka.KafkaConnectionError("the cluster tells of no broker")


async def stop_client(client: AIOKafkaClient) -> None:
    """Close the connections."""
    await _settle(client)
    await client.close()


async def stop_producer(producer: AIOKafkaProducer, *, flush: bool) -> None:
    """End a producer within a few seconds. ``flush`` waits for what was handed to it, if the cluster is there."""
    if flush:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await producer.flush()
                await _settle(producer.client)
                await producer.stop()
                return
    await _force_producer_down(producer)


async def stop_consumer(consumer: AIOKafkaConsumer) -> None:
    """End a consumer within a few seconds; with TLS it takes up to ``FETCH_WAIT_MS``."""
    consumer.pause(*consumer.assignment())
    await _settle(consumer._client)
    stopping = asyncio.ensure_future(consumer.stop())
    await asyncio.wait({stopping}, timeout=STOP_TIMEOUT_S)
    if stopping.done() and not stopping.cancelled() and stopping.exception() is None:
        return
    stopping.cancel()
    await asyncio.wait({stopping})
    await _force_consumer_down(consumer)


async def _force_producer_down(producer: AIOKafkaProducer) -> None:
    """``AIOKafkaProducer.stop`` waits for ever for batches that no broker takes; there is no public way round it."""
    producer._closed = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await producer._sender.close()
    await producer.client.close()


async def _force_consumer_down(consumer: AIOKafkaConsumer) -> None:
    """``AIOKafkaConsumer.stop`` is itself cancelled when it meets a fetch that waits to retry (``Fetcher.close``
    awaits the task that it cancelled), and then leaves its connections open."""
    await consumer._client.close()


async def _settle(client: AIOKafkaClient) -> None:
    """Under TLS, just before ``close``: let what is under way come to its end.

    A broker answers the good-bye of TLS only after the request that it works on. uvloop may wait for the answer until
    its own bound of half a minute, if a request goes out at the same time. And ``close`` cancels a connection that is
    being made, and forgets it: it would outlive the log.
    """
    if client._ssl_context is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                async with client._get_conn_lock:
                    pass
                while any(connection._requests for connection in client._conns.values()):  # noqa: ASYNC110 - no event
                    await asyncio.sleep(_LOOK_S)


async def _answering_first(servers: tuple[str, ...], timeout_s: float) -> list[str]:
    """The servers, one that takes connections first: aiokafka tries them in order, each with the full timeout."""
    if len(servers) == 1:
        return list(servers)

    async def knock(server: str) -> str:
        host, _, port = server.rpartition(":")
        _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.close()
        return server

    knocks = {asyncio.ensure_future(knock(server)) for server in servers}
    pending, first = set(knocks), None
    deadline = asyncio.get_running_loop().time() + timeout_s
    try:
        while pending and first is None:
            left = deadline - asyncio.get_running_loop().time()
            done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            first = next((task.result() for task in done if task.exception() is None), None)
    finally:
        for task in knocks:
            task.cancel()
        await asyncio.gather(*knocks, return_exceptions=True)
    return sorted(servers, key=lambda server: server != first)

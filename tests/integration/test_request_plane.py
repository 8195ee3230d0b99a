from __future__ import annotations

import asyncio
import os
import socket
import threading

import msgspec
import pytest
import zmq
import zmq.asyncio
import zmq.auth
from zmq.auth.asyncio import AsyncioAuthenticator

from dynamo_es.clock import SystemClock
from dynamo_es.errors import CannotConnect, Disconnected
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.curve import load_curve_keys, start_authenticator
from dynamo_es.runtime.errors import Overloaded, RequestPlaneError
from dynamo_es.runtime.request_client import ClientLimits, Connection, ConnectionPool
from dynamo_es.runtime.request_server import Batch, RequestServer
from dynamo_es.runtime.wire import Cancel, Hello, Open, PayloadCodec, WireCodec
from tests.support.runtimes import wait_for

ENDPOINT = "ns/comp/ep"
ENCODE = PayloadCodec().encode


class Plane:
    """A server and the pools that a test asks for, all closed at the end."""

    def __init__(self) -> None:
        self.contexts: list[zmq.Context] = []
        self.servers: list[RequestServer] = []
        self.pools: list[ConnectionPool] = []
        self.authenticators: list[AsyncioAuthenticator] = []

    async def server(self, handler, **options) -> RequestServer:
        self.contexts.append(zmq.Context())
        settings = {
            "instance_id": 7, "host": "127.0.0.1", "port": 0, "max_streams": 100, "max_message_bytes": 1 << 20,
            "peer_timeout_s": 1.0, "clock": SystemClock(), **options,
        }  # fmt: skip
        if "keys" in options:
            self.authenticators.append(start_authenticator(self.contexts[-1], options["keys"]))
        server = RequestServer(self.contexts[-1], **settings)
        await server.start()
        server.add_endpoint(ENDPOINT, handler)
        self.servers.append(server)
        return server

    def pool(self, *, keys=None, timeout_s=1.0, connect_s=2.0, window=16) -> ConnectionPool:
        self.contexts.append(zmq.Context())
        limits = ClientLimits(window, 1 << 20, connect_s, timeout_s)
        pool = ConnectionPool(self.contexts[-1], limits=limits, clock=SystemClock(), client_name="test", keys=keys)
        self.pools.append(pool)
        return pool

    async def close(self) -> None:
        for pool in self.pools:
            pool.close()
        for server in self.servers:
            await server.close()
        for authenticator in self.authenticators:
            authenticator.stop()
        for context in self.contexts:
            await asyncio.to_thread(context.term)


@pytest.fixture
async def plane():
    plane = Plane()
    yield plane
    await plane.close()


def address(server: RequestServer) -> str:
    return f"tcp://127.0.0.1:{server.port}"


async def echo(request, context):
    for number in range(3):
        yield [request, number]


async def call(pool, server, request="x", instance=7, context=None):
    connection = await pool.connect(address(server), instance)
    stream = connection.open(ENDPOINT, ENCODE(request), context or Context())
    return [item async for batch in stream.batches() for item in batch]


async def test_a_call_and_its_answer(plane):
    server = await plane.server(echo)
    assert await call(plane.pool(), server) == [["x", 0], ["x", 1], ["x", 2]]
    assert server.streams == 0


async def test_items_of_one_step_of_many_streams_travel_in_one_message(plane):
    step = asyncio.Event()
    waiting = 0

    async def engine(request, context):
        nonlocal waiting
        waiting += 1
        await step.wait()
        yield Batch([request, "second"])

    server = await plane.server(engine)
    pool = plane.pool()
    connection = await pool.connect(address(server), 7)
    messages = []
    original = connection._on_message
    connection._pump._on_message = lambda parts: (messages.append(parts), original(parts))
    streams = [connection.open(ENDPOINT, ENCODE(number), Context()) for number in range(20)]
    await wait_for(lambda: waiting == 20)
    messages.clear()
    step.set()
    results = await asyncio.gather(*(collect(stream) for stream in streams))
    assert results == [[number, "second"] for number in range(20)]
    assert len(messages) <= 3


async def collect(stream):
    return [item async for batch in stream.batches() for item in batch]


async def test_nobody_there_is_found_out_at_once(plane):
    pool = plane.pool(connect_s=30)
    async with asyncio.timeout(60):
        with pytest.raises(CannotConnect, match="was lost"):
            await pool.connect("tcp://127.0.0.1:1", 7)


async def test_somebody_who_does_not_speak_the_protocol(plane):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        pool = plane.pool(connect_s=0.3)
        with pytest.raises(CannotConnect):
            await pool.connect(f"tcp://127.0.0.1:{silent.getsockname()[1]}", 7)


async def test_another_process_on_the_address_is_not_taken_for_the_instance(plane):
    server = await plane.server(echo)
    with pytest.raises(CannotConnect, match="another process has taken its address"):
        await call(plane.pool(), server, instance=8)


async def test_an_endpoint_that_is_not_served(plane):
    server = await plane.server(echo)
    connection = await plane.pool().connect(address(server), 7)
    with pytest.raises(CannotConnect, match="endpoint other is not served here"):
        await collect(connection.open("other", ENCODE(1), Context()))


async def test_the_stream_bound_refuses_and_recovers(plane):
    go = asyncio.Event()

    async def hold(request, context):
        await go.wait()
        yield request

    server = await plane.server(hold, max_streams=2)
    connection = await plane.pool().connect(address(server), 7)
    held = [connection.open(ENDPOINT, ENCODE(number), Context()) for number in range(2)]
    with pytest.raises(Overloaded, match="2 streams are open"):
        await collect(connection.open(ENDPOINT, ENCODE(9), Context()))
    go.set()
    assert await asyncio.gather(*(collect(stream) for stream in held)) == [[0], [1]]
    assert await collect(connection.open(ENDPOINT, ENCODE(3), Context())) == [3]


async def test_a_server_that_goes_silent_is_dead_after_its_time(plane):
    async def hang(request, context):
        yield 1
        await asyncio.Event().wait()

    server = await plane.server(hang)
    connection = await plane.pool(timeout_s=0.5).connect(address(server), 7)
    stream = connection.open(ENDPOINT, ENCODE(1), Context())
    batches = stream.batches()
    assert await anext(batches) == [1]
    # The socket stays connected, as with a stopped process; only nobody reads it any more.
    asyncio.get_running_loop().remove_reader(server._pump._fd)
    server._pump._closed = True
    with pytest.raises(Disconnected, match="no sign of life"):
        await anext(batches)
    server._pump._closed = False


async def test_a_client_that_goes_silent_has_its_streams_cancelled(plane):
    ended = asyncio.Event()

    async def endless(request, context):
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            ended.set()

    server = await plane.server(endless, peer_timeout_s=0.4)
    connection = await plane.pool(timeout_s=60).connect(address(server), 7)
    batches = connection.open(ENDPOINT, ENCODE(1), Context()).batches()
    await anext(batches)
    connection._keeper.cancel()
    async with asyncio.timeout(60):
        await ended.wait()
    await wait_for(lambda: server.streams == 0)


async def test_a_stream_that_is_killed_before_its_first_step_leaves_nothing_behind(plane):
    server = await plane.server(echo, max_streams=3)
    connection = await plane.pool().connect(address(server), 7)
    for _ in range(5):
        context = Context()
        stream = connection.open(ENDPOINT, ENCODE(1), context)
        # Both frames travel in one message, so the server takes them in one go.
        connection.queue(Cancel(stream._number, True))
        await wait_for(lambda: not connection.streams)
        with pytest.raises(CannotConnect, match="the stream was cut"):
            await collect(stream)
    assert server.streams == 0
    assert server._endpoints[ENDPOINT].idle.is_set()
    assert server._endpoints[ENDPOINT].streams == 0
    assert len(await call(plane.pool(), server)) == 3


async def test_a_peer_that_is_dropped_before_its_streams_began_leaves_nothing_behind(plane):
    server = await plane.server(echo)
    served = server._endpoints[ENDPOINT]
    connection = await plane.pool().connect(address(server), 7)
    (peer,) = server._peers.values()
    stream = connection.open(ENDPOINT, ENCODE(1), Context())
    original = server._on_message
    server._pump._on_message = lambda parts: (original(parts), peer.streams and server._drop_peer(peer, "test"))
    # It was only silent: the peer comes back and must not wait for streams that are cut.
    with pytest.raises(CannotConnect, match="the stream was cut"):
        await collect(stream)
    server._pump._on_message = original
    assert (server.streams, served.streams, served.idle.is_set()) == (0, 0, True)
    assert len(await collect(connection.open(ENDPOINT, ENCODE(1), Context()))) == 3


async def test_a_server_that_closes_takes_no_more_streams(plane):
    release = asyncio.Event()

    async def slow_to_end(request, context):
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            await release.wait()

    server = await plane.server(slow_to_end)
    connection = await plane.pool().connect(address(server), 7)
    batches = connection.open(ENDPOINT, ENCODE(1), Context()).batches()
    await anext(batches)
    closing = asyncio.ensure_future(server.close())
    with pytest.raises(CannotConnect, match="is not served here"):
        await collect(connection.open(ENDPOINT, ENCODE(2), Context()))
    release.set()
    await closing
    assert server.streams == 0
    await batches.aclose()


async def test_a_stream_number_that_is_in_use_is_not_taken_twice(plane):
    gate = asyncio.Event()
    ended = []

    async def hold(request, context):
        try:
            await gate.wait()
            yield request
        finally:
            ended.append(request)

    server = await plane.server(hold)
    wire = WireCodec(1 << 20)
    context = zmq.asyncio.Context()
    peer = context.socket(zmq.DEALER)
    peer.connect(address(server))
    for number in range(3):
        await peer.send(wire.encode([Hello(1, "twice"), Open(1, ENDPOINT, f"r{number}", {}, 16, ENCODE(number))]))
        await peer.recv()
    assert server.streams == 1
    gate.set()
    await wait_for(lambda: server.streams == 0)
    assert ended == [0]
    peer.close(linger=0)
    context.term()


async def test_SCALE_05_a_hung_instance_holds_up_nobody_else(plane):
    async def hang(request, context):
        await asyncio.Event().wait()
        yield 1

    hung = await plane.server(hang)
    healthy = await plane.server(echo, instance_id=9)
    pool = plane.pool()
    connection = await pool.connect(address(hung), 7)
    waiting = [asyncio.create_task(collect(connection.open(ENDPOINT, ENCODE(1), Context()))) for _ in range(50)]
    async with asyncio.timeout(60):
        for _ in range(20):
            assert len(await call(pool, healthy, instance=9)) == 3
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_garbage_is_dropped_and_the_plane_goes_on(plane):
    server = await plane.server(echo)
    context = zmq.asyncio.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(address(server))
    for message in (b"", b"\xff", os.urandom(1000), msgspec.msgpack.encode([[2, 1]]), msgspec.msgpack.encode([99])):
        await stranger.send(message)
    await stranger.send_multipart([b"too", b"many", b"parts"])
    assert len(await call(plane.pool(), server)) == 3
    stranger.close(linger=0)
    context.term()


async def test_a_payload_that_is_no_msgpack_costs_its_stream_only(plane):
    server = await plane.server(echo)
    connection = await plane.pool().connect(address(server), 7)
    good = connection.open(ENDPOINT, ENCODE("x"), Context())
    with pytest.raises(CannotConnect, match="Generate Error"):
        await collect(
            connection.open(ENDPOINT, msgspec.Raw(msgspec.msgpack.encode({"a": "b"})[:-1] + b"\xc1"), Context())
        )
    assert connection.closed or len(await collect(good)) == 3


async def test_a_port_in_use_says_which_option(plane):
    server = await plane.server(echo)
    with pytest.raises(RequestPlaneError, match=f"127.0.0.1:{server.port}.*--request-plane-port"):
        await plane.server(echo, port=server.port)


async def test_curve_admits_the_fleet_and_nobody_else(plane, tmp_path):
    for name in ("fleet", "other"):
        zmq.auth.create_certificates(tmp_path, name)
    fleet = load_curve_keys(str(tmp_path / "fleet.key_secret"))
    other = load_curve_keys(str(tmp_path / "other.key_secret"))
    assert fleet.secret.decode() not in repr(fleet)
    server = await plane.server(echo, keys=fleet)
    assert len(await call(plane.pool(keys=fleet), server)) == 3
    for stranger in (other, None):
        with pytest.raises(CannotConnect):
            await call(plane.pool(keys=stranger, connect_s=1.0), server)
    assert len(await call(plane.pool(keys=fleet), server)) == 3


async def test_ending_a_context_whose_handshakes_failed_does_not_block(plane, tmp_path, monkeypatch):
    """With RECONNECT_IVL -1 about every second of these never ended: where the socket was asked between the failure
    and its closing, as happens when the loop sees the socket's descriptor before the monitor's."""
    told = Connection._on_monitor
    monkeypatch.setattr(Connection, "_on_monitor", lambda self, parts: (self._pump._drain(), told(self, parts)))
    zmq.auth.create_certificates(tmp_path, "fleet")
    server = await plane.server(echo, keys=load_curve_keys(str(tmp_path / "fleet.key_secret")))
    enders = []
    for _ in range(20):
        context = zmq.Context()
        limits = ClientLimits(16, 1 << 20, 2.0, 1.0)
        pool = ConnectionPool(context, limits=limits, clock=SystemClock(), client_name="stranger")
        with pytest.raises(CannotConnect, match="was lost"):
            await pool.connect(address(server), 7)
        pool.close()
        # A daemon: one that blocks must fail this test, not hang all of them.
        enders.append(threading.Thread(target=context.term, daemon=True))
        enders[-1].start()
    await wait_for(lambda: not any(thread.is_alive() for thread in enders))


async def test_curve_refuses_a_stranger_who_knows_the_public_key(plane, tmp_path):
    for name in ("fleet", "thief"):
        zmq.auth.create_certificates(tmp_path, name)
    fleet = load_curve_keys(str(tmp_path / "fleet.key_secret"))
    thief = load_curve_keys(str(tmp_path / "thief.key_secret"))
    server = await plane.server(echo, keys=fleet)
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = fleet.public, thief.public, thief.secret
    monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    dealer.connect(address(server))
    async with asyncio.timeout(60):
        event = zmq.utils.monitor.parse_monitor_message(await monitor.recv_multipart())
    assert event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    dealer.disable_monitor()
    monitor.close(linger=0)
    dealer.close(linger=0)
    context.term()

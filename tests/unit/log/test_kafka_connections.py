"""What is left open of a connection to a broker that takes it, says which versions it knows, and then nothing."""

from __future__ import annotations

import asyncio
import gc
import struct

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.log.errors import LogUnavailable
from dynamo_es.log.kafka import KafkaLog
from tests.support.runtimes import wait_for

_API_VERSIONS = 18
# Keys of Metadata and ApiVersions, with the versions that a broker knows.
_KNOWN = ((3, 0, 5), (_API_VERSIONS, 0, 0))


class SilentBroker:
    """``asked``: requests that got no answer. ``open``: connections."""

    def __init__(self):
        self.asked = self.open = 0

    async def serve(self, reader, writer):
        self.open += 1
        try:
            while True:
                (size,) = struct.unpack(">i", await reader.readexactly(4))
                key, _, correlation = struct.unpack(">hhi", (await reader.readexactly(size))[:8])
                if key != _API_VERSIONS:
                    self.asked += 1
                    continue
                answer = struct.pack(">ihi", correlation, 0, len(_KNOWN))
                answer += b"".join(struct.pack(">hhh", *versions) for versions in _KNOWN)
                writer.write(struct.pack(">i", len(answer)) + answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self.open -= 1
            writer.close()


@pytest.fixture
async def broker():
    broker = SilentBroker()
    server = await asyncio.start_server(broker.serve, "127.0.0.1", 0)
    broker.url = f"kafka://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield broker
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("end", ["by itself", "cancelled"])
async def test_a_start_that_ends_while_the_broker_is_silent_leaves_no_connection_open(broker, end):
    told = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["message"]))
    bound_ms = 300 if end == "by itself" else 60_000
    log = KafkaLog.from_url(f"{broker.url}?connect_timeout_ms={bound_ms}", SystemClock(), {})
    start = asyncio.create_task(log.start())
    await wait_for(lambda: broker.asked)
    if end == "cancelled":
        start.cancel()
    # Whoever keeps the error keeps what was forgotten in it.
    with pytest.raises((LogUnavailable, asyncio.CancelledError)) as kept:
        await start
    await wait_for(lambda: broker.open == 0)
    await log.close()
    del start, kept
    gc.collect()
    await asyncio.sleep(0)
    assert told == []

"""The two ends of the request plane as a runtime's settings say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import zmq

from dynamo_es.runtime.request_client import ClientLimits, ConnectionPool
from dynamo_es.runtime.request_server import RequestServer

if TYPE_CHECKING:
    from dynamo_es.runtime.core import RuntimeCore


def build_request_server(core: RuntimeCore, context: zmq.Context[zmq.Socket[bytes]]) -> RequestServer:
    """What takes requests; not started."""
    runtime = core.settings.runtime
    return RequestServer(
        context,
        instance_id=core.instance_id,
        host=runtime.host,
        port=runtime.port,
        max_streams=runtime.max_streams,
        max_message_bytes=runtime.max_message_bytes,
        peer_timeout_s=runtime.lease_ttl_s,
        clock=core.clock,
        keys=core.curve_keys,
        tracer=core.tracing,
        tasks=core.tasks,
    )


def build_connection_pool(core: RuntimeCore, context: zmq.Context[zmq.Socket[bytes]]) -> ConnectionPool:
    """What sends them; it connects when it is asked for an instance."""
    runtime = core.settings.runtime
    limits = ClientLimits(
        window=runtime.stream_window,
        max_message_bytes=runtime.max_message_bytes,
        connect_timeout_s=runtime.connect_timeout_s,
        peer_timeout_s=runtime.lease_ttl_s,
        first_item_timeout_s=runtime.first_item_timeout_s or runtime.stream_timeout_s or None,
        item_timeout_s=runtime.stream_timeout_s or None,
    )
    name = f"{core.settings.role}/{core.instance_id:x}"
    return ConnectionPool(
        context, limits=limits, clock=core.clock, client_name=name, keys=core.curve_keys, tasks=core.tasks
    )

"""Processes of a fleet: discovery, leases, endpoints and the request plane.

The names of Dynamo's ``dynamo.runtime`` are here, too. They are imported when they are asked for: the rooms of this
package are used by whatever they import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo_es.runtime.client import Client as Client
    from dynamo_es.runtime.context import Context as Context
    from dynamo_es.runtime.decorators import dynamo_worker as dynamo_worker
    from dynamo_es.runtime.endpoint import Endpoint as Endpoint
    from dynamo_es.runtime.runtime import DistributedRuntime as DistributedRuntime

_PLACES = {
    "Client": "client",
    "Context": "context",
    "DistributedRuntime": "runtime",
    "Endpoint": "endpoint",
    "dynamo_worker": "decorators",
}


def __getattr__(name: str) -> Any:
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{place}"), name)

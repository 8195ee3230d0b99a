"""Changing a worker's taints over HTTP: ``POST /engine/update/model_taints`` of its system status server
(spec/services d.3).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from dynamo_es.models.registration import update_model_taints
from dynamo_es.runtime.endpoint import Endpoint

TAINTS_ROUTE = "update/model_taints"


def taints_route(endpoints: Sequence[Endpoint]) -> Callable[[Any], Awaitable[dict[str, Any]]]:
    """The route's answer to a body ``{"taints": [...]}``; register it with ``register_engine_route``.

    It replaces the taints of the model of every endpoint, and raises ValueError for a body of another form, or as
    ``update_model_taints`` does.
    """

    async def update(body: Any) -> dict[str, Any]:
        taints = body.get("taints") if isinstance(body, dict) else None
        if not isinstance(taints, list) or not all(isinstance(taint, str) for taint in taints):
            raise ValueError("'taints' must be a JSON array of strings")
        for endpoint in endpoints:
            await update_model_taints(endpoint, set(taints))
        return {"status": "ok", "taints": sorted(set(taints))}

    return update

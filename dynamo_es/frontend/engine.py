"""From a preprocessed request to a worker: the ``TokenEngine`` over a request router."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import chain
from typing import Any

from dynamo_es.errors import CannotConnect, InvalidArgument
from dynamo_es.http_error import HttpError
from dynamo_es.router.disagg_router import DisaggRouter
from dynamo_es.router.errors import BookingConflict, NoEligibleWorker, RouterQueueLimitExceeded
from dynamo_es.router.kv_router import routing_request
from dynamo_es.router.request_router import RequestRouter
from dynamo_es.router.routing_request import RoutingRequest
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.errors import NoInstances, Overloaded


def _routing(request: dict[str, Any], request_id: str) -> RoutingRequest:
    """As ``routing_request``; several lists of ids count as one, and text, which nobody counted, as none."""
    token_ids = request.get("token_ids")
    if token_ids is None:
        request = {**request, "token_ids": []}
    elif isinstance(token_ids, list) and token_ids and isinstance(token_ids[0], list):
        request = {**request, "token_ids": list(chain.from_iterable(token_ids))}
    return routing_request(request, request_id)


class RoutedTokenEngine:
    """A ``TokenEngine``: routes each request and passes on what its worker says.

    Attributes:
        router: To the workers that answer.
        disagg: Over these and the workers that compute prompts for them; None: each computes its own.
    """

    def __init__(self, router: RequestRouter, disagg: DisaggRouter | None = None) -> None:
        self.router = router
        self.disagg = disagg

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
        route = self.disagg if self.disagg is not None and self.disagg.is_active() else self.router
        routing = _routing(request, context.id())
        try:
            async with aclosing(route.stream(routing, request, context)) as batches:
                async for batch in batches:
                    yield batch
        except (NoEligibleWorker, NoInstances) as error:
            if routing.worker_id is not None and not self.router.has_worker(routing.worker_id):
                raise InvalidArgument("Invalid request") from error
            raise CannotConnect(str(error)) from error
        except (Overloaded, RouterQueueLimitExceeded) as error:
            raise HttpError(529, str(error)) from error
        except BookingConflict as error:
            raise HttpError(409, f"request id {context.id()} is in use") from error

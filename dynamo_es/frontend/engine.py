"""From a preprocessed request to a worker: the ``TokenEngine`` over a request router."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from dynamo_es.errors import CannotConnect
from dynamo_es.http_error import HttpError
from dynamo_es.router.errors import BookingConflict, NoEligibleWorker, RouterQueueLimitExceeded
from dynamo_es.router.kv_router import routing_request
from dynamo_es.router.request_router import RequestRouter
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.errors import NoInstances, Overloaded


class RoutedTokenEngine:
    """A ``TokenEngine``: routes each request and passes on what its worker says."""

    def __init__(self, router: RequestRouter) -> None:
        self.router = router

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
        try:
            async with aclosing(
                self.router.stream(routing_request(request, context.id()), request, context)
            ) as batches:
                async for batch in batches:
                    yield batch
        except (NoEligibleWorker, NoInstances) as error:
            raise CannotConnect(str(error)) from error
        except (Overloaded, RouterQueueLimitExceeded) as error:
            raise HttpError(529, str(error)) from error
        except BookingConflict as error:
            raise HttpError(409, f"request id {context.id()} is in use") from error

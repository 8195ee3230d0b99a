"""How adapters are loaded and unloaded from outside: endpoints of the request plane, routes of the system server.

Both are Dynamo's: endpoints ``load_lora``, ``unload_lora`` and ``list_loras`` beside the worker's own, and ``GET`` and
``POST /v1/loras``, ``DELETE /v1/loras/{name}``. An endpoint answers for its worker; a route for all workers of its
process, which have the same adapters then or, after an error, those that they had.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dynamo_es.engines.lora.errors import AdapterConflict, AdapterMissing, TooManyOperations
from dynamo_es.engines.lora.service import AdapterService
from dynamo_es.engines.lora.turns import Turns
from dynamo_es.errors import DynamoException, EngineShutdown, InvalidArgument
from dynamo_es.log.errors import LogError
from dynamo_es.models.errors import LoraError
from dynamo_es.models.lora_sources import SourceRefused
from dynamo_es.runtime.endpoint import Endpoint
from dynamo_es.runtime.system_server import json_response, read_body

logger = logging.getLogger(__name__)
Answer = dict[str, Any]
_STATUS: tuple[tuple[type[DynamoException], int], ...] = (
    (SourceRefused, 403), (InvalidArgument, 400), (LoraError, 404), (AdapterMissing, 404), (AdapterConflict, 409),
    (TooManyOperations, 503), (EngineShutdown, 503), (LogError, 503),
)  # fmt: skip
"""HTTP status by error, the first that fits; 500 for others. Dynamo answers 500 to all."""


async def serve_adapters(service: AdapterService) -> None:
    """Serve the three endpoints until the runtime shuts down. Raises as ``Endpoint.serve_endpoint``."""
    base = service.endpoint

    def serve(name: str, call: Callable[[Any], Awaitable[Answer]]) -> Awaitable[tuple[()]]:
        async def handle(request: Any) -> AsyncGenerator[Answer, None]:
            try:
                answer = await call(request)
            except DynamoException as error:
                answer = {"status": "error", "message": str(error)}
            yield answer

        return Endpoint(base.core, f"{base.namespace}.{base.component}.{name}").serve_endpoint(handle)

    async def load(request: Any) -> Answer:
        return await service.load(*read_load(request))

    async def unload(request: Any) -> Answer:
        return await service.unload(read_name(request))

    async def list_all(request: Any) -> Answer:
        return service.list_loras()

    await asyncio.gather(serve("load_lora", load), serve("unload_lora", unload), serve("list_loras", list_all))


def adapter_routes(services: Sequence[AdapterService]) -> list[Route]:
    """The routes, for all workers of a process. Of two calls the second begins when all workers have done the first."""
    turns = Turns()

    async def list_all(request: Request) -> Response:
        first, *others = [service.names() for service in services]
        names = {name: number for name, number in first.items() if all(name in other for other in others)}
        return json_response({"status": "success", "loras": names, "count": len(names)})

    async def load(request: Request) -> Response:
        body = await read_body(request)
        if isinstance(body, Response):
            return body
        return await _respond(turns, lambda: _load_everywhere(services, body))

    async def unload(request: Request) -> Response:
        return await _respond(turns, lambda: _unload_everywhere(services, request.path_params["name"]))

    return [
        Route("/v1/loras", list_all),
        Route("/v1/loras", load, methods=["POST"]),
        Route("/v1/loras/{name:path}", unload, methods=["DELETE"]),
    ]


def read_load(request: Any) -> tuple[str, str]:
    """Name and URI of ``{"lora_name", "source": {"uri"}}``. Raises ``InvalidArgument``."""
    name = read_name(request)
    source = request.get("source")
    uri = source.get("uri") if isinstance(source, dict) else None
    if not isinstance(uri, str) or not uri:
        raise InvalidArgument("'source.uri' must say where the adapter is, such as file:///srv/loras/poet")
    return name, uri


def read_name(request: Any) -> str:
    """``lora_name``. Raises ``InvalidArgument``."""
    name = request.get("lora_name") if isinstance(request, dict) else None
    if not isinstance(name, str) or not name:
        raise InvalidArgument("'lora_name' must be a string")
    return name


async def _load_everywhere(services: Sequence[AdapterService], body: Any) -> Answer:
    name, uri = read_load(body)
    fresh: list[AdapterService] = []
    answer: Answer = {}
    try:
        for service in services:
            had = name in service.names()
            answer = await service.load(name, uri)
            if not had:
                fresh.append(service)
    except DynamoException:
        for service in fresh:
            try:
                await service.unload(name)
            except DynamoException as error:
                logger.warning("an adapter that other workers refused stays at one: %s", error)
        raise
    return answer


async def _unload_everywhere(services: Sequence[AdapterService], name: str) -> Answer:
    holders = [service for service in services if name in service.names()]
    answers = [await service.unload(name) for service in holders or services[:1]]
    return answers[0]


async def _respond(turns: Turns, call: Callable[[], Awaitable[Answer]]) -> Response:
    try:
        async with turns.take():
            return json_response(await call())
    except DynamoException as error:
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
        if status >= 500:
            logger.warning("an adapter was not loaded or unloaded: %s", error)
        return json_response({"status": "error", "message": str(error)}, status)

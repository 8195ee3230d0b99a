"""The selection service over HTTP (spec/services f.3)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dynamo_es.router.errors import SelectionServiceError
from dynamo_es.router.selection_service import SelectionService
from dynamo_es.services.json_app import OK, Answer, Call, JsonRoute, Manners, build_json_app, health_answer
from dynamo_es.services.json_bodies import (
    BodyShape,
    Member,
    hash_list,
    one_of,
    refused_shape,
    text,
    token_list,
    u32,
    u64,
)
from dynamo_es.services.refusals import ServiceRefusal
from dynamo_es.services.slot_tracker_http import names_of

BODY_LIMIT = 8 * 1024 * 1024
_U64 = 2**64
_TENANT: Mapping[str, Member] = {"model_name": text(), "routing_group": text()}
_PATCH: Mapping[str, Member] = {
    **{name: text() for name in ("endpoint", "kv_events_endpoint", "replay_endpoint", "stable_routing_id")},
    **{name: u32() for name in ("block_size", "data_parallel_start_rank", "data_parallel_size")},
    **{name: u64() for name in ("max_num_batched_tokens", "total_kv_blocks")},
    "kv_transfer_enforcement": one_of("required", "preferred"),
}
_PROMPT: Mapping[str, Member] = {
    **_TENANT,
    "token_ids": token_list(),
    "block_hashes": hash_list(),
    "sequence_hashes": hash_list(),
    "isl_tokens": u64(),
    "lora_name": text(),
    "cache_salt": text(),
}
_WORKER = BodyShape("WorkerRequest", {"worker_id": u64(required=True), **_TENANT, **_PATCH})
_CHANGES = BodyShape("WorkerPatch", _PATCH)
_QUERY = BodyShape("PromptRequest", _PROMPT)
_SELECT = BodyShape("SelectRequest", {**_PROMPT, "selection_id": text()})
_RESERVATION = BodyShape(
    "ReservationRequest",
    {
        **_PROMPT,
        "selection_id": text(required=True),
        "worker_id": u64(),
        "dp_rank": u32(),
        "effective_prefill_tokens": u64(),
    },
)
_OUTPUT = BodyShape("OutputBlockRequest", {})
_PEER = BodyShape("PeerRequest", {"endpoint": text(required=True)})
T = TypeVar("T")
Ask = Callable[[Any], Awaitable[Any]]


def build_selection_app(service: SelectionService) -> Starlette:
    """The ASGI application. ``service`` belongs to its event loop."""
    routes = [
        JsonRoute("GET", "/health", lambda call: health_answer(service.dead_tasks(), OK)),
        JsonRoute("GET", "/ready", lambda call: _ready(service)),
        JsonRoute("GET", "/dump", _asking(lambda body: service.indexer_snapshot())),
        JsonRoute("POST", "/overlap_scores", _asking(service.overlap_scores), _QUERY),
        JsonRoute("POST", "/potential_loads", _asking(service.potential_loads), _QUERY),
        JsonRoute("POST", "/select", _asking(service.select), _SELECT),
        JsonRoute("POST", "/select_and_reserve", _asking(service.select_and_reserve), _SELECT),
        JsonRoute("GET", "/loads", lambda call: (200, _loads(service, call))),
        *_worker_routes(service),
        *_reservation_routes(service),
        *_replica_routes(service),
    ]
    return build_json_app(routes, Manners(BODY_LIMIT), [_wrong_id()])


def _asking(ask: Ask, status: int = 200) -> Callable[[Call], Awaitable[Answer]]:
    """A route that asks with its body. What the service cannot read it says before it is awaited."""

    async def answer(call: Call) -> Answer:
        try:
            asked = ask(call.body)
        except ValueError as error:
            raise refused_shape(call.raw, str(error)) from error
        return status, await _settled(asked)

    return answer


async def _settled(asked: Awaitable[T]) -> T:
    try:
        return await asked
    except ValueError as error:
        raise ServiceRefusal(400, str(error)) from error
    except SelectionServiceError as error:
        raise ServiceRefusal(error.status_code, str(error)) from error


def _ready(service: SelectionService) -> Answer:
    state = service.ready()
    return (200 if state["ready"] else 503), state


def _loads(service: SelectionService, call: Call) -> list[dict[str, Any]]:
    model, group = names_of(call)
    return service.loads(model_name=model, routing_group=group)


def _worker_routes(service: SelectionService) -> list[JsonRoute]:
    def workers(call: Call) -> Answer:
        model, group = names_of(call)
        return 200, service.list_workers(model_name=model, routing_group=group)

    async def patch(call: Call) -> Answer:
        return await _asking(lambda body: service.patch_worker(_worker_id(call), _with_ranks(body)))(call)

    async def delete(call: Call) -> Answer:
        return 200, await _settled(service.delete_worker(_worker_id(call)))

    return [
        JsonRoute("GET", "/workers", workers),
        JsonRoute("POST", "/workers", _asking(lambda body: service.upsert_worker(_with_ranks(body)), 201), _WORKER),
        JsonRoute("PATCH", "/workers/{worker_id:int}", patch, _CHANGES),
        JsonRoute("DELETE", "/workers/{worker_id:int}", delete),
    ]


def _with_ranks(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A worker's description, whose ranks are texts in JSON."""
    given = body.get("kv_events_endpoints")
    if not isinstance(given, dict):
        return body
    ranks = {int(rank) if rank.isdecimal() else rank: endpoint for rank, endpoint in given.items()}
    return {**body, "kv_events_endpoints": ranks}


def _worker_id(call: Call) -> int:
    number = int(call.path["worker_id"])
    if number >= _U64:
        raise ServiceRefusal(404, f"worker {number} not found")
    return number


def _wrong_id() -> Route:
    """An id that is no number is told in text, as in Dynamo."""

    async def refuse(request: Request) -> Response:
        said = f"Invalid URL: Cannot parse `{request.path_params['worker_id']}` to a `u64`"
        return Response(said, 400, media_type="text/plain")

    return Route("/workers/{worker_id:str}", refuse, methods=["PATCH", "DELETE"])


def _reservation_routes(service: SelectionService) -> list[JsonRoute]:
    async def complete(call: Call) -> Answer:
        await _settled(service.prefill_complete(call.path["name"]))
        return 200, OK

    async def free(call: Call) -> Answer:
        await _settled(service.free_reservation(call.path["name"]))
        return 200, OK

    async def output_block(call: Call) -> Answer:
        fraction = call.body.get("decay_fraction")
        if fraction is not None and (isinstance(fraction, bool) or not isinstance(fraction, int | float)):
            raise refused_shape(call.raw, "decay_fraction: invalid type, expected f64")

        async def add() -> None:
            service.add_output_block(call.path["name"], decay_fraction=fraction)

        await _settled(add())
        return 200, OK

    return [
        JsonRoute("POST", "/reservations", _asking(service.create_reservation, 201), _RESERVATION),
        JsonRoute("POST", "/reservations/{name}/prefill_complete", complete),
        JsonRoute("POST", "/reservations/{name}/output_block", output_block, _OUTPUT),
        JsonRoute("DELETE", "/reservations/{name}", free),
    ]


def _replica_routes(service: SelectionService) -> list[JsonRoute]:
    async def change(asked: Awaitable[bool]) -> bool:
        try:
            return await asked
        except ValueError as error:
            # Dynamo has a status of its own for it.
            status = 409 if "disabled" in str(error) else 400
            raise ServiceRefusal(status, str(error)) from error
        except SelectionServiceError as error:
            raise ServiceRefusal(error.status_code, str(error)) from error

    async def register(call: Call) -> Answer:
        return (201 if await change(service.register_replica_peer(call.body["endpoint"])) else 200), OK

    async def deregister(call: Call) -> Answer:
        if not await change(service.deregister_replica_peer(call.body["endpoint"])):
            raise ServiceRefusal(404, "peer not found")
        return 200, OK

    return [
        JsonRoute("GET", "/replica_sync/peers", lambda call: (200, service.list_replica_peers())),
        JsonRoute("POST", "/replica_sync/register_peer", register, _PEER),
        JsonRoute("POST", "/replica_sync/deregister_peer", deregister, _PEER),
    ]

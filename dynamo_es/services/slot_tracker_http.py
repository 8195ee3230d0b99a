"""The slot tracker over HTTP (spec/services f.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.applications import Starlette

from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.hashing import to_unsigned
from dynamo_es.router.replica_link import ReplicaLink
from dynamo_es.router.selection_requests import DEFAULT, PartitionKey
from dynamo_es.runtime.health import tasks_entry
from dynamo_es.services.json_app import OK, Answer, Call, JsonRoute, Manners, build_json_app, health_answer
from dynamo_es.services.json_bodies import BodyShape, Member, hash_list, text, u32, u64
from dynamo_es.services.refusals import ServiceRefusal
from dynamo_es.services.slot_tracker import SlotTracker

BODY_LIMIT = 2 * 1024 * 1024
_TENANT: Mapping[str, Member] = {"model_name": text(required=True), "routing_group": text()}
_WORKER: Mapping[str, Member] = {"worker_id": u64(required=True), **_TENANT}
_RANGE: Mapping[str, Member] = {name: u32(required=True) for name in ("block_size", "dp_start", "dp_size")}
_REGISTER = BodyShape("RegisterRequest", {**_WORKER, **_RANGE})
_UNREGISTER = BodyShape("UnregisterRequest", _WORKER)
_NAMED = BodyShape("RequestRef", {**_TENANT, "request_id": text(required=True)})
_PROMPT: Mapping[str, Member] = {"sequence_hashes": hash_list(required=True), "new_isl_tokens": u64()}
_LOADS = BodyShape("PotentialLoadsRequest", {**_TENANT, **_PROMPT})
_ADD = BodyShape(
    "AddRequest",
    {
        **_TENANT,
        "request_id": text(required=True),
        "worker_id": u64(required=True),
        "dp_rank": u32(required=True),
        **_PROMPT,
    },
)
_PEER = BodyShape("PeerRequest", {"endpoint": text(required=True)})


def build_slot_tracker_app(tracker: SlotTracker, replicas: ReplicaLink | None) -> Starlette:
    """The ASGI application. ``replicas`` None: replica sync is off; otherwise it is started."""
    dead = replicas.tasks.dead if replicas is not None else ()
    routes = [
        JsonRoute("GET", "/health", lambda call: health_answer(tasks_entry(dead), None)),
        JsonRoute("GET", "/workers", lambda call: (200, tracker.workers(*names_of(call)))),
        JsonRoute("GET", "/loads", lambda call: (200, tracker.loads(*names_of(call)))),
        *_booking_routes(tracker),
        *replica_routes(lambda: replicas),
    ]
    return build_json_app(routes, Manners(BODY_LIMIT))


def _booking_routes(tracker: SlotTracker) -> list[JsonRoute]:
    def register(call: Call) -> Answer:
        body = call.body
        tracker.register(tenant_of(body), body["worker_id"], body["block_size"], body["dp_start"], body["dp_size"])
        return 201, OK

    def unregister(call: Call) -> Answer:
        tracker.unregister(tenant_of(call.body), call.body["worker_id"])
        return 200, OK

    def add(call: Call) -> Answer:
        body = call.body
        rank = WorkerRank(body["worker_id"], body["dp_rank"])
        tracker.add(tenant_of(body), body["request_id"], rank, _hashes(body), body.get("new_isl_tokens") or 0)
        return 201, OK

    def prefill_complete(call: Call) -> Answer:
        tracker.prefill_complete(tenant_of(call.body), call.body["request_id"])
        return 200, OK

    def free(call: Call) -> Answer:
        tracker.free(tenant_of(call.body), call.body["request_id"])
        return 200, OK

    def potential_loads(call: Call) -> Answer:
        body = call.body
        return 200, tracker.potential_loads(tenant_of(body), _hashes(body), body.get("new_isl_tokens") or 0)

    return [
        JsonRoute("POST", "/register", register, _REGISTER),
        JsonRoute("POST", "/unregister", unregister, _UNREGISTER),
        JsonRoute("POST", "/add", add, _ADD),
        JsonRoute("POST", "/prefill_complete", prefill_complete, _NAMED),
        JsonRoute("POST", "/free", free, _NAMED),
        JsonRoute("POST", "/potential_loads", potential_loads, _LOADS),
    ]


def replica_routes(link: Callable[[], ReplicaLink | None]) -> list[JsonRoute]:
    """Routes by which replicas are made known to each other. ``link`` None: replica sync is off."""

    def peers(call: Call) -> Answer:
        known = link()
        return 200, [] if known is None else known.peers()

    def register(call: Call) -> Answer:
        return (201 if _changed(ReplicaLink.add_peer, call) else 200), OK

    def deregister(call: Call) -> Answer:
        if not _changed(ReplicaLink.remove_peer, call):
            raise ServiceRefusal(404, "peer not found")
        return 200, OK

    def _changed(change: Callable[[ReplicaLink, str], bool], call: Call) -> bool:
        known = link()
        if known is None:
            raise ServiceRefusal(409, "replica sync is disabled")
        try:
            return change(known, call.body["endpoint"])
        except ValueError as error:
            raise ServiceRefusal(400, str(error)) from error

    return [
        JsonRoute("GET", "/replica_sync/peers", peers),
        JsonRoute("POST", "/replica_sync/register_peer", register, _PEER),
        JsonRoute("POST", "/replica_sync/deregister_peer", deregister, _PEER),
    ]


def tenant_of(body: Mapping[str, Any]) -> PartitionKey:
    """The model and routing group that a body names."""
    return PartitionKey(body["model_name"], body.get("routing_group") or DEFAULT)


def names_of(call: Call) -> tuple[str | None, str | None]:
    """Model and routing group that a query asks for; None: all."""
    return call.query.get("model_name"), call.query.get("routing_group")


def _hashes(body: Mapping[str, Any]) -> list[int]:
    return [to_unsigned(value) for value in body["sequence_hashes"]]

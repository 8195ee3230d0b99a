"""Topic ``registry``: who is there. Leases, endpoint instances, model cards; compacted by key, null deletes a key.

A lease ends by an event, never by a clock in a fold: whoever sees first that a lease was not renewed for its time to
live appends ``LeaseEnded`` naming the last renewal it saw. A renewal that came in between makes that event void.
Everything that names an ended lease is gone with it.
"""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import quote

import msgspec

from schemas.numbers import Unsigned
from schemas.topic import Cleanup, TopicSpec

ProcessRole = Literal["worker", "frontend", "router", "indexer", "tool"]
InstanceState = Literal["serving", "draining"]


class Lease(msgspec.Struct, tag="lease", array_like=True, gc=False):
    """A grant or a renewal; each is complete, as compaction keeps only the newest.

    Attributes:
        lease_id: u64, one a process and registration; a process that lost its lease takes a new one.
        owner: What kind of process holds it.
        owner_id: Instance id (workers) or router id (routers).
        ttl_ms: Without a renewal for this long the lease may be ended by anyone.
        renewal: 0 for the grant, then dense.
    """

    version: int
    lease_id: Unsigned
    owner: ProcessRole
    owner_id: Unsigned
    ttl_ms: Unsigned
    renewal: Unsigned


class LeaseEnded(msgspec.Struct, tag="lease-ended", array_like=True, gc=False):
    """The lease is over: ``revoked`` by its owner, or ``expired``, seen by ``by`` after renewal ``renewal``."""

    version: int
    lease_id: Unsigned
    renewal: Unsigned
    reason: Literal["revoked", "expired"]
    by: str


class Instance(msgspec.Struct, tag="instance", array_like=True):
    """An endpoint that one process serves.

    Attributes:
        namespace, component, endpoint: The endpoint's path.
        instance_id: u64, one a process; also the default worker id of its publishers.
        lease_id: The instance is gone when this lease is.
        transport: Kind of the request plane, ``zmq``.
        address: Where it listens, for example ``tcp://10.0.0.7:40123``.
        state: ``draining`` takes no new requests.
        device_type: For example ``cuda`` or ``cpu``.
        runtime_data: Small facts that clients may wait for.
        public_key: CURVE public key (Z85) if the request plane is encrypted.
    """

    version: int
    namespace: str
    component: str
    endpoint: str
    instance_id: Unsigned
    lease_id: Unsigned
    transport: str
    address: str
    state: InstanceState = "serving"
    device_type: str = "cpu"
    runtime_data: dict[str, str] = {}
    public_key: str | None = None


class ModelCard(msgspec.Struct, tag="model-card", array_like=True):
    """One model (or LoRA) that one instance serves. Field names are those of Dynamo's model deployment card.

    Attributes:
        suffix: Slug of the LoRA; empty for the base model.
        display_name: Name by which requests ask for it.
        source_path: Model directory or hub id, as the worker saw it; ``builtin:bytes`` is the built-in tokenizer.
        model_input: ``Text``, ``Tokens`` or ``Tensor``.
        model_type: Capitalised names joined by `` | ``, for example ``Chat | Completions``.
        worker_type: prefill, decode, encode or aggregated.
        needs: Worker types that must also be there, in disjunctive normal form.
        context_length: Tokens; 0 if unknown.
        kv_cache_block_size: Tokens a block.
        runtime_config: total_kv_blocks, max_num_seqs, data_parallel_size, taints, parsers, ... (Dynamo's names).
        checksums: ``blake3:<hex>`` of each tokenizer and template file, by file name; equal names with unequal
            sums are different models.
        lora_name: Name of the LoRA that this is; its base model is at ``source_path``.
        user_data: What whoever registered the model wants to be told with it; JSON.
        details: What else Dynamo's card says, by its names there (``media_decoder``, ``router_config``, ...), and
            ``file_sizes`` in bytes, by file name.
    """

    version: int
    namespace: str
    component: str
    endpoint: str
    instance_id: Unsigned
    lease_id: Unsigned
    suffix: str
    display_name: str
    source_path: str
    model_input: str
    model_type: str
    worker_type: str
    needs: list[list[str]]
    context_length: int
    kv_cache_block_size: int
    migration_limit: int = 0
    aliases: list[str] = []
    runtime_config: dict[str, Any] = {}
    checksums: dict[str, str] = {}
    lora_name: str | None = None
    user_data: Any = None
    details: dict[str, Any] = {}


class ResyncAsked(msgspec.Struct, tag="resync-asked", array_like=True, gc=False):
    """A reader knows that it misses events of a source, and asks the worker to announce its whole state again.

    The worker answers with a ``kv-events`` record that has ``reset`` set. Whoever asked deletes the key when the
    source is exact again, or gone.

    Attributes:
        model, worker_id, dp_rank, incarnation: The source, as in ``kv-events``; for another incarnation of it the
            question is void.
        next_seq: The first ``seq`` of the source that was not seen when this was asked.
        attempt: From 1; a question that was not answered is asked again with the next number.
        by: Who asked, for people.
    """

    version: int
    model: str
    worker_id: Unsigned
    dp_rank: Unsigned
    incarnation: Unsigned
    next_seq: Unsigned
    attempt: Unsigned
    by: str


RegistryValue = Lease | LeaseEnded | Instance | ModelCard | ResyncAsked

REGISTRY = TopicSpec(
    name="registry",
    version=1,
    value=RegistryValue,
    key=(
        "lease/<id> | lease-end/<id> | instance/<ns>/<component>/<endpoint>/<id> | "
        "model/<ns>/<component>/<endpoint>/<id>[/<suffix>] | resync/<model>/<worker_id>:<dp_rank>"
    ),
    partitions=1,
    cleanup=Cleanup.COMPACTION,
    description="Leases, instances, model cards, questions to workers; one partition, so that they have one order.",
)


def _part(text: str) -> str:
    return quote(text, safe="")


def key_lease(lease_id: int) -> bytes:
    """Record key of a lease and its renewals."""
    return f"lease/{lease_id:x}".encode()


def key_lease_end(lease_id: int) -> bytes:
    """Record key of a lease's end: another one, so that a late renewal does not replace it under compaction."""
    return f"lease-end/{lease_id:x}".encode()


def key_instance(namespace: str, component: str, endpoint: str, instance_id: int) -> bytes:
    """Record key of an instance. Names may hold any character, so each part is percent-encoded."""
    return f"instance/{_part(namespace)}/{_part(component)}/{_part(endpoint)}/{instance_id:x}".encode()


def key_model(namespace: str, component: str, endpoint: str, instance_id: int, suffix: str = "") -> bytes:
    """Record key of a model card; a LoRA has its slug as one more part."""
    key = f"model/{_part(namespace)}/{_part(component)}/{_part(endpoint)}/{instance_id:x}"
    return (f"{key}/{_part(suffix)}" if suffix else key).encode()


def key_resync(model: str, worker_id: int, dp_rank: int) -> bytes:
    """Record key of the question to a source of KV events."""
    return f"resync/{_part(model)}/{worker_id}:{dp_rank}".encode()

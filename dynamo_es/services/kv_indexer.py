"""The standalone KV indexer: engines tell it over ZMQ what they hold, and it says what of a prompt is where (spec f.1).

There is no log here, as in Dynamo: what it knows is gone with the process, unless a peer tells. Fleets that have a log
run ``dynamo-es indexer`` instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo_es.background import BackgroundTasks
from dynamo_es.publishers.zmq_relay import ZmqRelay
from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.cost_selector import TierOverlap
from dynamo_es.router.engine_feed import EngineFeed
from dynamo_es.router.engine_index import EngineIndex
from dynamo_es.router.hashing import block_seed, hash_blocks
from dynamo_es.router.peer_recovery import fetch_dump
from dynamo_es.router.reports import dump_events
from dynamo_es.router.selection_catalog import zmq_endpoint_problem
from dynamo_es.router.selection_requests import PartitionKey
from dynamo_es.services.refusals import ServiceRefusal

MAX_INSTANCES = 100_000
"""Of all tenants together; one more is refused with 409."""
MAX_RANKS = 1024
"""Listeners of one instance."""
MAX_PEERS = 1024


@dataclass(slots=True)
class _Listener:
    """One rank's events. ``task`` None: it is paused."""

    endpoint: str
    relay: ZmqRelay
    task: asyncio.Task[None] | None = None

    @property
    def status(self) -> str:
        if self.task is None:
            return "paused"
        if self.task.done():
            return "failed"
        return "active" if self.relay.connected else "pending"

    def shown(self) -> dict[str, str]:
        shown = {"endpoint": self.endpoint, "status": self.status}
        if self.status == "failed":
            error = None if self.task is None or self.task.cancelled() else self.task.exception()
            shown["last_error"] = (
                "the endpoint cannot be listened to"
                if error is None
                else f"its listener died of {type(error).__name__}"
            )
        return shown


@dataclass(slots=True)
class _Partition:
    block_size: int
    index: EngineIndex = field(default_factory=EngineIndex)
    instances: dict[int, dict[int, _Listener]] = field(default_factory=dict)


class KvIndexer:
    """Instances, listeners and indexes by tenant. Belongs to one event loop; ``close`` ends it.

    ``tasks``: its listeners. Every refusal is a ``ServiceRefusal`` with Dynamo's text. Counts in answers are in tokens.
    """

    def __init__(self) -> None:
        self.tasks = BackgroundTasks()
        self._partitions: dict[PartitionKey, _Partition] = {}
        self._owners: dict[int, PartitionKey] = {}
        self._peers: dict[str, None] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._recovered: dict[str, Any] = {}

    def register(
        self,
        key: PartitionKey,
        instance_id: int,
        endpoint: str,
        block_size: int,
        dp_rank: int = 0,
        replay_endpoint: str | None = None,
    ) -> None:
        """Listen to one rank's events. 400, 409."""
        problem = zmq_endpoint_problem(endpoint)
        if problem is not None:
            raise ServiceRefusal(400, problem)
        problem = None if replay_endpoint is None else zmq_endpoint_problem(replay_endpoint)
        if problem is not None:
            raise ServiceRefusal(400, f"invalid replay endpoint `{replay_endpoint}`: {problem}")
        partition = self._partitions.get(key)
        if partition is not None and partition.block_size != block_size:
            raise ServiceRefusal(
                409, f"block_size mismatch for {key}: existing={partition.block_size}, requested={block_size}"
            )
        owner = self._owners.get(instance_id)
        if owner not in (None, key):
            raise ServiceRefusal(409, f"instance {instance_id} is already registered for {owner}")
        listeners = {} if partition is None else partition.instances.get(instance_id, {})
        if dp_rank in listeners:
            raise ServiceRefusal(409, f"instance {instance_id} dp_rank {dp_rank} already registered")
        if block_size == 0:
            raise ServiceRefusal(400, "block_size must be greater than 0")
        if len(self._owners) >= MAX_INSTANCES or len(listeners) >= MAX_RANKS:
            raise ServiceRefusal(409, f"at most {MAX_INSTANCES} instances of {MAX_RANKS} ranks are taken")
        self._listen(key, instance_id, endpoint, block_size, dp_rank, replay_endpoint)

    def unregister(
        self, model_name: str, routing_group: str | None, instance_id: int, dp_rank: int | None = None
    ) -> None:
        """Forget an instance, or one rank of it, with what it holds. 404."""
        owner = self._owners.get(instance_id)
        if owner is None:
            raise ServiceRefusal(404, f"instance {instance_id} not found")
        if owner.model_name != model_name or routing_group not in (None, owner.routing_group):
            raise ServiceRefusal(404, f"instance {instance_id} is registered for {owner}")
        partition = self._partitions[owner]
        listeners = partition.instances[instance_id]
        if dp_rank is not None:
            if dp_rank not in listeners:
                raise ServiceRefusal(404, f"instance {instance_id} dp_rank {dp_rank} not found")
            self._end(listeners.pop(dp_rank))
            partition.index.clear((instance_id, dp_rank))
            if listeners:
                return
        for listener in listeners.values():
            self._end(listener)
        partition.index.clear_ranks(instance_id)
        del partition.instances[instance_id], self._owners[instance_id]
        if not partition.instances:
            del self._partitions[owner]

    def workers(self, model_name: str | None = None, routing_group: str | None = None) -> list[dict[str, Any]]:
        """Instances of these tenants, with the state of their listeners."""
        return [
            {
                "instance_id": instance_id,
                "source": "zmq",
                "status": _status([listener.status for listener in listeners.values()]),
                "model_name": key.model_name,
                "routing_group": key.routing_group,
                "block_size": partition.block_size,
                "endpoints": {str(rank): listener.endpoint for rank, listener in listeners.items()},
                "listeners": {str(rank): listener.shown() for rank, listener in listeners.items()},
            }
            for key, partition in self._partitions.items()
            if model_name in (None, key.model_name) and routing_group in (None, key.routing_group)
            for instance_id, listeners in partition.instances.items()
        ]

    def query(
        self, key: PartitionKey, token_ids: Sequence[int], lora_name: str | None = None, cache_salt: str | None = None
    ) -> dict[str, Any]:
        """What every instance holds of a prompt; blocks that are not full are passed over. 404."""
        partition = self._partition(key)
        return self._scores(partition, hash_blocks(token_ids, partition.block_size, block_seed(lora_name, cache_salt)))

    def query_by_hash(self, key: PartitionKey, tokens_hashes: Sequence[int]) -> dict[str, Any]:
        """The same for a prompt whose blocks are hashed already (u64). 404."""
        return self._scores(self._partition(key), tokens_hashes)

    def dump(self) -> dict[str, Any]:
        """All that the indexes hold, by ``model:group``, as router events."""
        return {
            f"{key.model_name}:{key.routing_group}": {
                "block_size": partition.block_size,
                "events": list(dump_events(partition.index.dump())),
            }
            for key, partition in self._partitions.items()
        }

    async def recover(self, peers: Sequence[str]) -> bool:
        """Take over what the first peer that answers knows of instances that are registered later; False: none does."""
        self._peers |= dict.fromkeys(peers)
        found = await fetch_dump(peers)
        self._recovered = dict(found or {})
        return found is not None

    def peers(self) -> list[str]:
        """URLs of peers, in no certain order."""
        return list(self._peers)

    def add_peer(self, url: str) -> None:
        """Remember a peer, whatever it is; once more is fine. 409: there are too many."""
        if url not in self._peers and len(self._peers) >= MAX_PEERS:
            raise ServiceRefusal(409, f"{MAX_PEERS} peers are registered already")
        self._peers[url] = None

    def remove_peer(self, url: str) -> None:
        """Forget a peer. 404."""
        if url not in self._peers:
            raise ServiceRefusal(404, "peer not found")
        del self._peers[url]

    def pause(self, instance_id: int, dp_rank: int | None = None) -> None:
        """Stop listening to a rank, by default the lowest; what it holds stays. 404, 409."""
        listener, rank = self._listener(instance_id, dp_rank)
        if listener.status == "paused":
            raise ServiceRefusal(409, f"instance {instance_id} dp_rank {rank} cannot be paused from status paused")
        self._end(listener)
        listener.task = None

    def resume(self, instance_id: int, dp_rank: int | None = None) -> None:
        """Listen again. 404, 409."""
        listener, rank = self._listener(instance_id, dp_rank)
        if listener.task is not None:
            text = f"instance {instance_id} dp_rank {rank} cannot be resumed from status {listener.status}"
            raise ServiceRefusal(409, text)
        listener.task = self._spawn(listener.relay, instance_id, rank)

    def counts(self) -> tuple[int, int, int]:
        """Tenants, instances, listeners."""
        listeners = sum(len(ranks) for known in self._partitions.values() for ranks in known.instances.values())
        return len(self._partitions), len(self._owners), listeners

    async def close(self) -> None:
        """Stop listening."""
        for partition in self._partitions.values():
            for listeners in partition.instances.values():
                for listener in listeners.values():
                    self._end(listener)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _listen(
        self, key: PartitionKey, instance_id: int, endpoint: str, block_size: int, dp_rank: int, replay: str | None
    ) -> None:
        partition = self._partitions.setdefault(key, _Partition(block_size))
        known = partition.instances.setdefault(instance_id, {})
        if not known:
            self._owners[instance_id] = key
            recovered = self._recovered.get(f"{key.model_name}:{key.routing_group}")
            if recovered is not None and recovered.block_size == block_size:
                recovered.apply(partition.index, instance_id)
        feed = EngineFeed(partition.index, instance_id, dp_rank, block_size)
        relay = ZmqRelay(feed, endpoint, replay_endpoint=replay)
        known[dp_rank] = _Listener(endpoint, relay, self._spawn(relay, instance_id, dp_rank))

    def _spawn(self, relay: ZmqRelay, instance_id: int, dp_rank: int) -> asyncio.Task[None]:
        return self.tasks.spawn(relay.run(), f"kv-events-{instance_id}:{dp_rank}", "kv-events")

    def _end(self, listener: _Listener) -> None:
        task = listener.task
        if task is not None:
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _listener(self, instance_id: int, dp_rank: int | None) -> tuple[_Listener, int]:
        owner = self._owners.get(instance_id)
        if owner is None:
            raise ServiceRefusal(404, f"instance {instance_id} not found")
        listeners = self._partitions[owner].instances[instance_id]
        rank = min(listeners) if dp_rank is None else dp_rank
        if rank not in listeners:
            raise ServiceRefusal(404, f"instance {instance_id} dp_rank {rank} not found")
        return listeners[rank], rank

    def _partition(self, key: PartitionKey) -> _Partition:
        partition = self._partitions.get(key)
        if partition is None:
            raise ServiceRefusal(404, f"no indexer for {key}")
        return partition

    @staticmethod
    def _scores(partition: _Partition, tokens_hashes: Sequence[int]) -> dict[str, Any]:
        size = partition.block_size
        by_instance: dict[int, dict[int, TierOverlap]] = {}
        for rank, overlap in _sorted(partition.index.match(tokens_hashes)):
            by_instance.setdefault(rank.worker_id, {})[rank.dp_rank] = overlap
        scores: dict[str, dict[str, int]] = {}
        instances: dict[str, Any] = {}
        for instance_id, held in by_instance.items():
            device = {str(rank): size * tiers.device for rank, tiers in held.items() if tiers.device}
            if device:
                scores[str(instance_id)] = device
            longest = size * max(map(sum, held.values()))
            instances[str(instance_id)] = {
                "longest_matched": longest,
                "gpu": max(device.values(), default=0),
                "dp": device,
                "cpu": size * max(tiers.device + tiers.host for tiers in held.values()),
                "disk": longest,
            }
        return {"scores": scores, "frequencies": [], "instances": instances}


def _sorted(found: dict[WorkerRank, TierOverlap]) -> Iterator[tuple[WorkerRank, TierOverlap]]:
    yield from sorted(found.items())


def _status(statuses: Sequence[str]) -> str:
    """Of an instance, by those of its listeners."""
    return next(status for status in ("failed", "pending", "active", "paused") if status in statuses)

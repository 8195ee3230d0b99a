"""Several brokers on this machine that are one Kafka cluster: every node broker and controller in one."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from tests.kafka.broker import READY_TIMEOUT_S, KafkaBroker, KafkaSetupError, free_ports, new_cluster_id

COPIES = 3
IN_SYNC = 2
# Kafka's default is 9 s, in which partitions of a broker that died have no leader. Longer than a busy machine's pauses.
SESSION_MS = 4_000
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class PartitionState:
    """A partition as the cluster's metadata tells it: numbers of nodes. ``leader``: -1 while there is none."""

    leader: int
    replicas: frozenset[int]
    in_sync: frozenset[int]


class ClusterNode(KafkaBroker):
    """One of several. ``controllers``: the port of each node's controller."""

    def __init__(self, data_dir: Path, port: int, number: int, controllers: dict[int, int], cluster_id: str) -> None:
        super().__init__(data_dir, port)
        self.number = number
        self._heap = "256m"
        self._controller_port = controllers[number]
        self._voters = ",".join(f"{node}@127.0.0.1:{port}" for node, port in controllers.items())
        self._cluster_id = cluster_id

    def _settings(self) -> dict[str, str]:
        settings = super()._settings()
        del settings["controller.quorum.bootstrap.servers"]
        return settings | {
            "node.id": str(self.number),
            "controller.quorum.voters": self._voters,
            "broker.session.timeout.ms": str(SESSION_MS),
            "broker.heartbeat.interval.ms": "500",
            "default.replication.factor": str(COPIES),
            "min.insync.replicas": str(IN_SYNC),
            "offsets.topic.replication.factor": str(COPIES),
            "transaction.state.log.replication.factor": str(COPIES),
            "transaction.state.log.min.isr": str(IN_SYNC),
            "share.coordinator.state.topic.replication.factor": str(COPIES),
            "share.coordinator.state.topic.min.isr": str(IN_SYNC),
            "auto.create.topics.enable": "false",
        }

    def _format_arguments(self) -> list[str]:
        return ["--cluster-id", self._cluster_id]


class KafkaCluster:
    """``COPIES`` nodes with their data below ``folder``. Nodes die with the thread that starts them."""

    def __init__(self, folder: Path) -> None:
        ports = free_ports(2 * COPIES)
        controllers = dict(enumerate(ports[:COPIES], 1))
        cluster_id = new_cluster_id()
        self.nodes = {
            number: ClusterNode(folder / f"node-{number}", port, number, controllers, cluster_id)
            for number, port in enumerate(ports[COPIES:], 1)
        }

    @property
    def bootstrap(self) -> str:
        return ",".join(node.bootstrap for node in self.nodes.values())

    def start(self) -> None:
        """Start the nodes that do not run and wait until all answer."""
        missing = [node for node in self.nodes.values() if not node.is_running]
        # Formatting takes a Java process each: side by side, while the brokers themselves belong to this thread.
        with ThreadPoolExecutor(COPIES) as pool:
            list(pool.map(lambda node: node.prepare(), missing))
        try:
            for node in missing:
                node.spawn()
            for node in missing:
                node.wait_ready()
        except KafkaSetupError:
            self.stop()
            raise

    def stop(self) -> None:
        """Safe to call twice. Nobody waits for the data, so the nodes need not hand over to each other."""
        for node in self.nodes.values():
            node.kill()

    async def partitions(self, *topics: str) -> dict[tuple[str, int], PartitionState]:
        """State of every partition of these topics, of all if none is named, as soon as a broker answers."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap, request_timeout_ms=5_000)
            try:
                await admin.start()
                described = await admin.describe_topics(list(topics) or None)
                break
            except (KafkaError, OSError) as error:
                if time.monotonic() > deadline:
                    raise KafkaSetupError(f"no broker of {self.bootstrap} tells of topics: {error}") from error
            finally:
                await admin.close()
            await asyncio.sleep(_LOOK_S)
        return {
            (topic["topic"], found["partition"]): PartitionState(
                found["leader"], frozenset(found["replicas"]), frozenset(found["isr"])
            )
            for topic in described
            for found in topic["partitions"]
        }

    async def wait_in_sync(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until every replica of every partition has what the leader has."""
        deadline = time.monotonic() + timeout_s
        while True:
            states = await self.partitions()
            behind = {place: state for place, state in states.items() if state.in_sync != state.replicas}
            if not behind:
                return
            if time.monotonic() > deadline:
                raise KafkaSetupError(f"not in sync after {timeout_s:g} s: {behind}")
            await asyncio.sleep(_LOOK_S)

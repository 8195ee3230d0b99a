"""Three brokers and three copies of every record, two of which it must have: what goes on while brokers are away."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from pathlib import Path

import httpx
import pytest

from dynamo_es.cli.main import main
from dynamo_es.log.base import Entry, TopicConfig
from dynamo_es.log.errors import LogUnavailable
from dynamo_es.log.kafka import KafkaLog
from dynamo_es.log.partitioning import partition_for
from dynamo_es.runtime.appender import topic_configs
from schemas.catalog import TOPICS
from schemas.kv_events import KV_EVENTS, key_kv_events
from schemas.registry import REGISTRY
from tests.kafka.broker import free_port, missing_tools
from tests.kafka.cluster import COPIES, IN_SYNC, KafkaCluster
from tests.support.chaos import ChaosProcesses, check_batches, ends_of
from tests.support.convergence import wait_converged
from tests.support.fleet import MODEL, Fleet
from tests.support.steady_load import SteadyLoad
from tests.support.stream_fleet import PARTITIONS, StreamFleet

pytestmark = [pytest.mark.kafka, pytest.mark.crash]
DEADLINE_S = 90.0
LEASE_S = 6.0
RATE = 15.0
PUBLISHERS = 2
REPLICATED = (f"--topic-replication={COPIES}", f"--topic-min-insync-replicas={IN_SYNC}")


@pytest.fixture(scope="module")
def killable_cluster(tmp_path_factory):
    if (reason := missing_tools()) is not None:
        pytest.skip(f"three brokers need Java and Kafka's jars on this machine: {reason}")
    cluster = KafkaCluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.stop()


@pytest.fixture
async def cluster(killable_cluster):
    """Three running brokers that the test may kill; the next one finds them whole again."""
    killable_cluster.start()
    await killable_cluster.wait_in_sync()
    return killable_cluster


async def until(condition, what: str) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not await condition():
                await asyncio.sleep(0.1)
    except TimeoutError:
        pytest.fail(f"not within {DEADLINE_S:g} s: {what}")


async def bring_back(cluster: KafkaCluster, *numbers: int) -> None:
    """As ``cluster.start``, while the loop goes on."""
    for number in numbers:
        cluster.nodes[number].spawn()
    for number in numbers:
        await asyncio.to_thread(cluster.nodes[number].wait_ready)


class Site:
    """What runs on the cluster: a frontend and mock workers under load, and, in a namespace of their own, publishers
    that note what was acknowledged and a replica that folds it."""

    def __init__(self, cluster: KafkaCluster, log: KafkaLog, folder: Path) -> None:
        self.cluster, self.log, self.folder = cluster, log, folder
        url = f"kafka://{cluster.bootstrap}"
        lease = ("--lease-ttl", f"{LEASE_S:g}", "--heartbeat", "1")
        self.fleet = Fleet(url, folder, f"fleet-{uuid.uuid4().hex[:8]}", lease)
        self.chaos = ChaosProcesses(url, folder, f"storm-{uuid.uuid4().hex[:8]}", pause_s=0.05)
        self.http = httpx.AsyncClient(timeout=DEADLINE_S)
        self.system = f"http://127.0.0.1:{free_port()}"

    async def start(self) -> None:
        for namespace in (self.fleet.namespace, self.chaos.namespace):
            await self.log.create_topics(topic_configs(namespace, COPIES))
        await self.fleet.frontend()
        await self.fleet.worker(1, "--num-workers", "2", "--system-port", self.system.rpartition(":")[2])
        await self.fleet.wait_workers(2, timeout_s=DEADLINE_S)
        await self.chaos.begin("replica", 0)
        for number in range(PUBLISHERS):
            await self.chaos.begin("publisher", number)
        self.load = SteadyLoad(self.fleet.base, MODEL, RATE, prompts=20)
        self.load.start()
        await self.goes_on()

    async def close(self) -> None:
        await self.http.aclose()
        await self.chaos.end_all()
        await self.fleet.close()

    async def leader_of(self, publisher: int) -> int:
        """The node that leads the partition of what this publisher writes."""
        topic = KV_EVENTS.qualified(self.chaos.namespace)
        partition = partition_for(key_kv_events("m", publisher, 0), KV_EVENTS.partitions)
        return (await self.cluster.partitions(topic))[topic, partition].leader

    async def answered(self, count: int) -> None:
        goal = len(self.load.outcomes) + count

        async def is_answered() -> bool:
            return len(self.load.outcomes) >= goal

        await until(is_answered, f"{count} more answers")

    async def goes_on(self) -> None:
        """Every publisher gets something acknowledged, requests are answered, the frontend's views follow."""
        before = self.chaos.acknowledged()

        async def all_published() -> bool:
            now = self.chaos.acknowledged()
            progress = {worker for (worker, life), count in now.items() if count > before.get((worker, life), 0) + 16}
            return len(progress) == PUBLISHERS

        await until(all_published, "every publisher has more acknowledged")
        await self.answered(10)
        await wait_converged(self.log, self.fleet.namespace, [self.fleet.base], [self.system], DEADLINE_S)

    async def log_entry(self) -> dict[str, object]:
        return (await self.http.get(f"{self.fleet.base}/health")).json()["log"]

    async def worker_metric(self, name: str) -> float:
        page = (await self.http.get(f"{self.system}/metrics")).text
        (value,) = re.findall(rf"^dynamo_es_{name} (\S+)$", page, re.MULTILINE)
        return float(value)

    async def settle(self) -> None:
        """Let everything come to rest, and compare."""
        await self.load.stop()
        failed = [outcome.error for outcome in self.load.outcomes if outcome.error is not None]
        assert not failed, failed[:3]
        await self.chaos.end_all("publisher")
        expected = await check_batches(self.log, self.chaos.namespace, self.chaos.acknowledged())
        ends = await ends_of(self.log, self.chaos.namespace)
        assert await self.chaos.converged_digest(0, ends) == expected
        await wait_converged(self.log, self.fleet.namespace, [self.fleet.base], [self.system], DEADLINE_S)
        # Nobody took the workers for gone, and nothing of theirs was lost.
        for name in ("lease_lost_total", "publisher_losses_total"):
            assert await self.worker_metric(name) == 0, name
        await check_batches(self.log, self.fleet.namespace, {})

    async def verify(self, capsys) -> None:
        """After ``close``: what the frontend committed is what the log folds to."""
        command = ["state", "verify", "--log", self.fleet.url, "--topic-namespace", self.fleet.namespace]
        code = await asyncio.to_thread(main, [*command, "--state-dir", str(self.folder / "frontend-state")])
        out = capsys.readouterr().out
        assert code == 0, out
        assert "kv-index: equal at " in out
        assert "requests: equal at " in out


@pytest.fixture
async def site(cluster, open_kafka, tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        site = Site(cluster, await open_kafka(cluster.bootstrap), tmp_path)
        stack.push_async_callback(site.close)
        await site.start()
        yield site


def test_topics_have_three_copies_and_say_so(killable_cluster, capsys):
    """What ``apply`` makes is there on every node; ``check`` finds what is not as declared."""
    killable_cluster.start()
    namespace = f"plan-{uuid.uuid4().hex[:8]}"

    def topics(action, *flags):
        command = ["topics", action, "--log", f"kafka://{killable_cluster.bootstrap}", "--topic-namespace", namespace]
        code = main([*command, *flags])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    code, _, err = topics("apply", "--topic-replication=4")
    assert code == 2
    assert "ask for a replication that the number of running brokers allows" in err
    code, out, _ = topics("apply", *REPLICATED)
    assert code == 0
    assert out.count("replication.factor 3, min.insync.replicas 2") == len(TOPICS)
    assert topics("check", *REPLICATED)[0] == 0
    names = [spec.qualified(namespace) for spec in TOPICS]
    states = asyncio.run(killable_cluster.partitions(*names))
    assert len(states) == sum(spec.partitions for spec in TOPICS)
    assert all(state.replicas == set(killable_cluster.nodes) for state in states.values())
    # One copy fewer would be enough: nothing can be appended once a single broker is away.
    code, out, _ = topics("check", "--topic-replication=3", "--topic-min-insync-replicas=3")
    assert code == 1
    assert out.count("min.insync.replicas 2 -> 3") == len(TOPICS)
    assert topics("apply", "--topic-replication=3", "--topic-min-insync-replicas=3")[0] == 0
    code, out, _ = topics("check", *REPLICATED)
    assert code == 1
    assert out.count("min.insync.replicas 3 -> 2") == len(TOPICS)
    code, out, _ = topics("check", "--topic-replication=2", "--topic-min-insync-replicas=3")
    assert code == 2


async def test_leaders_that_are_killed_under_load_cost_nothing(site: Site, cluster: KafkaCluster, open_kafka, capsys):
    """A topic that wants more copies in sync than there are says so meanwhile; the others take everything."""
    strict = await open_kafka(cluster.bootstrap, "?request_timeout_ms=3000")
    await strict.create_topics([TopicConfig("all-or-nothing", 1, replication=COPIES, min_insync_replicas=COPIES)])
    for publisher in range(PUBLISHERS):
        await strict.append("all-or-nothing", Entry(b"v"))
        victim = await site.leader_of(publisher)
        cluster.nodes[victim].kill()
        await site.goes_on()
        assert await site.leader_of(publisher) != victim
        with pytest.raises(LogUnavailable, match=r"not in sync: 0 \(down to 2 of 3; "):
            await strict.append("all-or-nothing", Entry(b"v"))
        await bring_back(cluster, victim)
        await cluster.wait_in_sync()
    await site.settle()
    await site.close()
    await site.verify(capsys)


async def test_a_rolling_restart_costs_nothing(site: Site, cluster: KafkaCluster, capsys):
    for number, node in cluster.nodes.items():
        await asyncio.to_thread(node.stop)
        await bring_back(cluster, number)
        await cluster.wait_in_sync()
    await site.goes_on()
    await site.settle()
    await site.close()
    await site.verify(capsys)


async def test_DISC_03_too_few_copies_for_longer_than_a_lease_cost_no_request_and_no_worker(
    site: Site, cluster: KafkaCluster, capsys
):
    """The one broker that is left leads the registry: everything that is there can be read, and nothing appended."""
    topic = REGISTRY.qualified(site.fleet.namespace)
    survivor = (await cluster.partitions(topic))[topic, 0].leader
    others = [number for number in cluster.nodes if number != survivor]
    await site.log.create_topics([TopicConfig("probe", 1, replication=COPIES)])
    await site.log.append("probe", Entry(b"v"))
    for number in others:
        cluster.nodes[number].kill()
    away = time.monotonic()

    async def is_told() -> bool:
        return (await site.log_entry())["state"] != "ok"

    await until(is_told, "/health tells that the log takes nothing")
    silent = ", ".join(map(str, others))
    with pytest.raises(LogUnavailable, match=f"brokers with its replicas that do not answer: {silent}"):
        await site.log.append("probe", Entry(b"v"))
    await asyncio.sleep(max(0.0, away + 2.5 * LEASE_S - time.monotonic()))
    await site.answered(20)
    entry = await site.log_entry()
    assert entry["buffered_records"] > 0
    assert entry["dropped_records"] == 0
    assert (await site.http.get(f"{site.fleet.base}/health")).status_code == 200
    await bring_back(cluster, *others)
    await site.goes_on()
    await site.settle()
    await site.close()
    await site.verify(capsys)


async def test_EVT_13_stream_workers_count_once_when_their_brokers_are_killed(cluster, open_kafka, tmp_path):
    options = "?request_timeout_ms=30000"
    log = await open_kafka(cluster.bootstrap, options)
    fleet = StreamFleet(log, f"kafka://{cluster.bootstrap}", tmp_path, COPIES)
    try:
        await fleet.start()
        await fleet.append(500)
        async with fleet.events():
            first, second = await fleet.worker("a"), await fleet.worker("b")
            await fleet.until(lambda: len(first.live() | second.live()) == PARTITIONS, "the workers have everything")
            for topic in (KV_EVENTS.qualified(fleet.namespace), "__consumer_offsets"):
                victim = (await cluster.partitions(topic))[topic, 0].leader
                cluster.nodes[victim].kill()
                before = await fleet.manifests()
                await asyncio.sleep(0.1)

                async def newer(before=before) -> bool:
                    now = await fleet.manifests()
                    return all(now[number][0] > before[number][0] for number in before if before[number][0])

                await fleet.until(newer, "snapshots of every partition, by whomever")
                await bring_back(cluster, victim)
                await cluster.wait_in_sync()
        await fleet.until(fleet.is_covered, "windows cover everything")
        assert await fleet.check_windows() > 20
        for worker in (first, second):
            await worker.leave()
        await fleet.check_snapshots()
    finally:
        await fleet.close()

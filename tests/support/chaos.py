"""Publishers and replicas as processes that may be killed at any instant, and what must hold afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from pathlib import Path

from dynamo_es.log.base import EventLog, TopicPartition
from dynamo_es.store.rocks import RocksStore
from schemas.codec import TopicCodec
from schemas.kv_events import KV_EVENTS, KvEvents
from streams.kv_index import KvIndexFold
from streams.refold import refold
from tests.support.fold_process import FAMILIES

# A life of a publisher: its worker and its incarnation.
Life = tuple[int, int]
DEADLINE_S = 90.0


class ChaosProcesses:
    """``publisher``, ``replica`` and ``streams`` processes by number. What they say and keep is in ``folder``.

    ``pause_s``: how long a publisher waits after each acknowledgement.
    """

    def __init__(self, url: str, folder: Path, namespace: str, pause_s: float = 0.01) -> None:
        self.url = url
        self.pause_s = pause_s
        self.folder = folder
        self.namespace = namespace
        self.running: dict[tuple[str, int], asyncio.subprocess.Process] = {}

    def command(self, kind: str, number: int) -> list[str]:
        if kind == "replica":
            return ["-m", "tests.support.fold_process", self.url, str(self._replica(number)), self.namespace]
        if kind == "publisher":
            notes = str(self.folder / f"acknowledged-{number}")
            told = (self.url, self.namespace, str(number), notes, str(self.pause_s))
            return ["-m", "tests.support.chaos_publisher", *told]
        return [
            "-m", "dynamo_es.cli.main", "streams", "--log", self.url, "--topic-namespace", self.namespace,
            "--state-dir", str(self.folder / "streams"), "--snapshot-interval", "1",
        ]  # fmt: skip

    async def begin(self, kind: str, number: int) -> None:
        output = (self.folder / f"{kind}-{number}.log").open("ab")
        with output:
            self.running[kind, number] = await asyncio.create_subprocess_exec(
                sys.executable, *self.command(kind, number), stdout=output, stderr=output
            )

    async def kill(self, kind: str, number: int) -> None:
        """End it and start it again."""
        await self.end(kind, number)
        await self.begin(kind, number)

    async def end(self, kind: str, number: int) -> None:
        """One that found no broker at its start has ended by itself, with an error: whoever supervises starts it."""
        process = self.running.pop((kind, number), None)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            await process.wait()

    async def end_all(self, *kinds: str) -> None:
        for kind, number in list(self.running):
            if not kinds or kind in kinds:
                await self.end(kind, number)

    def acknowledged(self) -> dict[Life, int]:
        """How many batches of each life were acknowledged."""
        found: dict[Life, int] = {}
        for path in self.folder.glob("acknowledged-*"):
            for line in path.read_text().splitlines():
                worker, incarnation, count = map(int, line.split())
                found[worker, incarnation] = count
        return found

    async def converged_digest(self, number: int, ends: dict[TopicPartition, int]) -> str:
        """What the replica has stored once it has everything up to ``ends``. It does not run afterwards."""
        run_s = 1.0
        async with asyncio.timeout(2 * DEADLINE_S):
            while True:
                await asyncio.sleep(run_s)
                await self.end("replica", number)
                digest, positions = self._stored(number)
                if all(positions.get(place) == end for place, end in ends.items()):
                    return digest
                # On a busy machine a process needs longer to start.
                run_s *= 2
                await self.begin("replica", number)

    def _replica(self, number: int) -> Path:
        return self.folder / f"replica-{number}"

    def _stored(self, number: int) -> tuple[str, dict[TopicPartition, int]]:
        store = RocksStore(self._replica(number), FAMILIES, lock_timeout_s=10)
        try:
            fold = KvIndexFold()
            return fold.digest(fold.load(store)), dict(store.positions(fold.name))
        finally:
            store.close()


async def ends_of(log: EventLog, namespace: str) -> dict[TopicPartition, int]:
    """Where the partitions of ``kv-events`` end."""
    topic = KV_EVENTS.qualified(namespace)
    return {TopicPartition(topic, number): bounds.end for number, bounds in (await log.bounds(topic)).items()}


async def batches_in(log: EventLog, namespace: str) -> dict[Life, set[int]]:
    """Numbers of all batches in the log, those of other publishers included."""
    codec = TopicCodec(KV_EVENTS)
    found: dict[Life, set[int]] = {}
    ends = await ends_of(log, namespace)
    reader = log.reader(dict.fromkeys(ends, 0))
    while any(reader.positions()[place] < end for place, end in ends.items()):
        for records in (await reader.poll(timeout_s=1)).values():
            for record in records:
                value = codec.decode(record.value, record.headers)
                assert isinstance(value, KvEvents)
                found.setdefault((value.worker_id, value.incarnation), set()).add(value.seq)
    await reader.close()
    return found


async def check_batches(log: EventLog, namespace: str, acknowledged: dict[Life, int]) -> str:
    """Every acknowledged batch is in the log, and a fold from the start has each batch once; the digest of that fold.

    Nobody may publish meanwhile.
    """
    present = await batches_in(log, namespace)
    for life, count in acknowledged.items():
        missing = set(range(count)) - present.get(life, set())
        assert not missing, f"acknowledged and not in the log: {life} {sorted(missing)[:5]}"
    state, _ = await refold(KvIndexFold(), log, namespace)
    last_life = dict(sorted(present))
    for key, source in state.sources.items():
        life = (key.worker_id, source.incarnation)
        assert source.exact, life
        assert life[1] == last_life[key.worker_id]
        assert source.next_seq == len(present[life]) >= acknowledged.get(life, 0), life
    return KvIndexFold().digest(state)

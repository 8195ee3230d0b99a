"""A fleet of processes whose broker goes away under load: requests are served, and views converge afterwards."""

from __future__ import annotations

import asyncio
import re
import time
import uuid

import httpx
import pytest

from dynamo_es.cli.main import main
from tests.kafka.broker import free_port
from tests.support.convergence import wait_converged
from tests.support.fleet import MODEL, Fleet
from tests.support.steady_load import SteadyLoad

pytestmark = [pytest.mark.kafka, pytest.mark.crash]

# Short enough to run out three times, long enough for a busy machine.
LEASE_S = 4.0
RATE = 15.0
DEADLINE_S = 60.0


async def until(condition, what):
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not await condition():
                await asyncio.sleep(0.05)
    except TimeoutError:
        pytest.fail(f"not within {DEADLINE_S:g} s: {what}")


async def test_DISC_03_a_broker_that_is_away_for_three_leases_costs_no_request_and_no_worker(
    own_broker, open_kafka, tmp_path, capsys
):
    namespace = f"away-{uuid.uuid4().hex[:8]}"
    lease = ("--lease-ttl", f"{LEASE_S:g}", "--heartbeat", "1")
    fleet = Fleet(f"kafka://{own_broker.bootstrap}", tmp_path, namespace, lease)
    log = await open_kafka(own_broker.bootstrap)
    system = f"http://127.0.0.1:{(port := free_port())}"
    http = httpx.AsyncClient(timeout=DEADLINE_S)

    async def log_entry():
        return (await http.get(f"{fleet.base}/health")).json()["log"]

    async def told_away():
        return (await log_entry())["state"] != "ok"

    async def answered(count):
        return len(load.outcomes) >= count

    try:
        await fleet.frontend()
        await fleet.worker(1, "--num-workers", "2", "--system-port", str(port))
        await fleet.wait_workers(2, timeout_s=DEADLINE_S)
        load = SteadyLoad(fleet.base, MODEL, RATE, prompts=20)
        load.start()
        await until(lambda: answered(20), "answers while the log is there")
        own_broker.kill()
        away = time.monotonic()
        await until(told_away, "/health tells that the log is away")
        await asyncio.sleep(max(0.0, away + 3 * LEASE_S - time.monotonic()))
        served = len(load.outcomes)
        await until(lambda: answered(served + 20), "answers after the leases have run out")
        assert (await http.get(f"{fleet.base}/health")).status_code == 200
        entry = await log_entry()
        assert entry["buffered_records"] > 0
        assert entry["dropped_records"] == 0
        own_broker.spawn()
        await asyncio.to_thread(own_broker.wait_ready)
        await wait_converged(log, namespace, [fleet.base], [system], DEADLINE_S)
        await load.stop()
        failed = [outcome.error for outcome in load.outcomes if outcome.error is not None]
        assert not failed, failed[:3]
        assert len(load.between(away, away + 3 * LEASE_S)) > RATE * LEASE_S
        page = (await http.get(f"{system}/metrics")).text
        # Nobody took the workers for gone, and nothing of theirs was lost.
        for name in ("lease_lost_total", "publisher_losses_total"):
            (value,) = re.findall(rf"^dynamo_es_{name} (\S+)$", page, re.MULTILINE)
            assert float(value) == 0, name
    finally:
        await http.aclose()
        await fleet.close()
    # What the frontend committed is what the log folds to.
    command = ["state", "verify", "--log", fleet.url, "--topic-namespace", namespace]
    code = await asyncio.to_thread(main, [*command, "--state-dir", str(tmp_path / "frontend-state")])
    out = capsys.readouterr().out
    assert code == 0, out
    assert "kv-index: equal at " in out
    assert "requests: equal at " in out

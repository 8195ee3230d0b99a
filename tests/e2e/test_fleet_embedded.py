from __future__ import annotations

import asyncio

import pytest

from tests.e2e.fleet_suite import FleetSuite


class TestFleetOnEmbeddedLog(FleetSuite):
    def log_url(self, tmp_path, request):
        return f"embedded://{tmp_path}/log", "dynamo"

    async def test_OPS_05_this_suite_notices_when_caches_do_not_count(self, fleet):
        """The engines' own caches still give hits, by luck: what is asserted is where requests were routed, and why."""
        await fleet.frontend("--router-kv-overlap-score-credit", "0")
        await asyncio.gather(*(fleet.worker(number) for number in (1, 2)))
        await fleet.wait_workers(2, timeout_s=60)
        with pytest.raises(AssertionError) as noticed:
            await self.check_chats_follow_their_prefix(fleet, 24)
        assert "_blocks" in str(noticed.traceback[-1].statement)

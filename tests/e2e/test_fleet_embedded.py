from __future__ import annotations

from tests.e2e.fleet_suite import FleetSuite


class TestFleetOnEmbeddedLog(FleetSuite):
    def log_url(self, tmp_path, request):
        return f"embedded://{tmp_path}/log", "dynamo"

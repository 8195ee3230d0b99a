from __future__ import annotations

import uuid

import pytest

from tests.e2e.fleet_suite import FleetSuite


@pytest.mark.kafka
class TestFleetOnKafka(FleetSuite):
    def log_url(self, tmp_path, request):
        return f"kafka://{request.getfixturevalue('kafka_bootstrap')}", f"fleet-{uuid.uuid4().hex[:8]}"

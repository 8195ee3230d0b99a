from __future__ import annotations

import pytest

from dynamo_es.router.candidates import EndpointRanks
from schemas.registry import Lease, key_lease, key_model
from streams.registry import RegistryFold
from streams.testing import FoldDriver
from tests.unit.frontend.fakes import card

WHERE = ("ns", "backend", "generate")


class NoClient:
    def routable(self):
        return []


def ranks(*cards, accepts=lambda worker_id: True):
    driver = FoldDriver(RegistryFold())
    for one in cards:
        driver.feed(Lease(1, one.lease_id, "worker", one.instance_id, 10_000, 0), key_lease(one.lease_id))
        driver.feed(one, key_model(*WHERE, one.instance_id))
    return EndpointRanks(lambda: driver.state, NoClient(), WHERE, accepts)


def worker(number, **changes):
    return card(
        namespace="ns", component="backend", endpoint="generate", instance_id=number, lease_id=number, **changes
    )


def test_the_type_is_that_of_the_workers_that_count():
    both = (worker(1, worker_type="prefill"), worker(2, worker_type="decode"))
    assert ranks(*both, accepts=lambda number: number == 2).worker_type() == "decode"
    assert ranks(*both, accepts=lambda number: number == 1).worker_type() == "prefill"
    assert ranks().worker_type() == "aggregated"


@pytest.mark.parametrize(
    ("endpoint", "bootstrap"),
    [
        ({"bootstrap_host": "10.0.0.7", "bootstrap_port": 8998}, ("10.0.0.7", 8998)),
        (None, None),
        ("10.0.0.7:8998", None),
        ({"bootstrap_host": "10.0.0.7"}, None),
        ({"bootstrap_host": "", "bootstrap_port": 8998}, None),
        ({"bootstrap_host": 7, "bootstrap_port": 8998}, None),
        ({"bootstrap_host": "h", "bootstrap_port": 0}, None),
        ({"bootstrap_host": "h", "bootstrap_port": 65_536}, None),
        ({"bootstrap_host": "h", "bootstrap_port": True}, None),
    ],
)
def test_an_address_for_prompts_is_one_or_is_none(endpoint, bootstrap):
    found = ranks(worker(1, runtime_config={"disaggregated_endpoint": endpoint}))
    assert found.facts(1).bootstrap == bootstrap

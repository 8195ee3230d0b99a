"""What routing reads of a preprocessed request."""

from __future__ import annotations

import pytest

from dynamo_es.errors import ConfigError, InvalidArgument
from dynamo_es.router.config_options import settings_from_environment
from dynamo_es.router.kv_router import affinity_of, routing_request


def read(routing=None, **request):
    return routing_request({"token_ids": [1], "routing": routing or {}, **request}, "r")


@pytest.mark.parametrize(
    ("routing", "worker"),
    [
        ({}, None),
        ({"backend_instance_id": 5}, 5),
        ({"backend_instance_id": 5, "decode_worker_id": 6}, 6),
        ({"backend_instance_id": 5, "decode_worker_id": 6, "worker_id": 0}, 0),
        ({"prefill_worker_id": 7}, None),
    ],
)
def test_the_worker_is_pinned_by_the_first_of_its_names(routing, worker):
    assert read(routing).worker_id == worker


def test_the_prefill_worker_has_pins_of_its_own():
    found = read({"prefill_worker_id": 7, "prefill_dp_rank": 1, "dp_rank": 2})
    assert (found.prefill_worker_id, found.prefill_dp_rank, found.worker_id, found.dp_rank) == (7, 1, None, 2)


def test_the_session_is_that_of_the_agent():
    assert read(agent_context={"session_id": "s", "parent_session_id": "p"}).session_id == "s"
    assert read(agent_context=None).session_id is None
    assert read(agent_context={}).session_id is None


@pytest.mark.parametrize("agent", ["s", ["s"], {"session_id": 5}])
def test_what_is_no_agent_context_is_refused(agent):
    with pytest.raises(InvalidArgument, match=r"agent_context must be an object|session_id must be a string"):
        read(agent_context=agent)


def test_affinity_is_off_without_a_time_and_its_mode_is_checked_all_the_same():
    assert affinity_of(None, "soft") is None
    found = affinity_of(30, "soft")
    assert found is not None
    assert (found.ttl_s, found.hard) == (30, False)
    with pytest.raises(ValueError, match="expected 'hard' or 'soft'"):
        affinity_of(None, "Hard")


def test_a_service_cannot_predict_prefill_times_and_says_so():
    with pytest.raises(ConfigError, match="DYN_ROUTER_PREFILL_LOAD_MODEL=aic is for frontends and routers"):
        settings_from_environment({"DYN_ROUTER_PREFILL_LOAD_MODEL": "aic"})
    assert settings_from_environment({"DYN_ROUTER_PREFILL_LOAD_MODEL": "none"}).router_prefill_load_model == "none"

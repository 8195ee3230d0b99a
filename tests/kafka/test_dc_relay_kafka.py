"""Two data centres on Kafka, a topic namespace each, and one view over both, as after their topics were copied."""

from __future__ import annotations

import random
import uuid

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.services.dc_relay.global_view import GlobalKvView, RelaySource
from dynamo_es.services.dc_relay.ranking import PromptQuery
from tests.support.relay_sites import Site
from tests.support.runtimes import wait_for

pytestmark = pytest.mark.kafka
PROMPT = list(range(100, 132))


async def test_a_view_over_two_namespaces_finds_the_prompt_and_starts_from_the_topics_alone(
    kafka_bootstrap, open_kafka
) -> None:
    run = uuid.uuid4().hex[:8]
    sites = [Site(name, url=f"kafka://{kafka_bootstrap}", namespace=f"{name}-{run}") for name in ("east", "west")]
    try:
        for site in sites:
            relay = await site.relay()
            worker = await site.worker()
            worker.store(PROMPT if site.dc_id == "west" else PROMPT[:12])
            blocks = 8 if site.dc_id == "west" else 3
            await wait_for(lambda relay=relay, blocks=blocks: list(relay.pools().values()) == [blocks])
        sources = [RelaySource(await open_kafka(kafka_bootstrap), f"{site.dc_id}-{run}") for site in sites]
        view = GlobalKvView(sources, clock=SystemClock(), rng=random.Random(1))
        await view.start(60)
        found = [(each.dc_id, each.matched_blocks, each.ready) for each in view.find(PromptQuery("m", PROMPT))]
        assert found == [("west", 8, True), ("east", 3, True)]
        assert sum(state.counters.gaps for state in view.states) == 0
        await view.close()
    finally:
        for site in sites:
            await site.close()

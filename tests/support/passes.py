"""Running a scheduler without an engine."""

from __future__ import annotations

from dynamo_es.engines.scheduling.request import PassPlan
from dynamo_es.engines.scheduling.scheduler import Scheduler


def run(engine: Scheduler, limit: int = 20_000) -> list[PassPlan]:
    """All passes until nothing is left to do; no block is held then."""
    plans = []
    while engine.has_work:
        plan = engine.schedule()
        assert plan.work, "a pass without work would turn for ever"
        engine.complete(plan)
        plans.append(plan)
        assert len(plans) < limit
    assert engine.blocks.used == 0
    return plans

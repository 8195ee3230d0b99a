"""Every recorded scenario of Dynamo's selection service gives the same answers here (E; golden selection.json)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo_es.router.cost import CandidateCost
from dynamo_es.router.cost_selector import CostSelector
from tests.support.selection_player import GOLDEN, Player


@pytest.mark.parametrize("scenario", GOLDEN["scenarios"], ids=lambda scenario: scenario["name"])
async def test_a_scenario_gives_what_the_reference_gave(
    scenario: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs: list[tuple[dict[str, float], float]] = []
    choose = CostSelector.choose

    def noting(*args: Any) -> Any:
        best, rows = choose(*args)
        # The reference logs the costs as they are before taints count, and that of the choice with them.
        logits = {name_of(row): row.cost / row.candidate.multiplier for row in rows}
        costs.append((logits, best.cost))
        return best, rows

    monkeypatch.setattr(CostSelector, "choose", noting)
    assert await Player(scenario, tmp_path).play() == []
    # Where ties are broken by chance, or the reference was still clearing up, what comes after that differs.
    if not scenario["has_ties"] and not scenario["unstable_steps"]:
        assert costs == [expected_costs(entry) for entry in scenario["cost_log"]]


def name_of(row: CandidateCost) -> str:
    return f"{row.candidate.rank.worker_id}:{row.candidate.rank.dp_rank}"


def expected_costs(entry: dict[str, Any]) -> Any:
    logits = {name: pytest.approx(row["logit"], abs=0.001) for name, row in entry["candidates"].items()}
    return logits, pytest.approx(entry["selected_cost"], abs=0.001)

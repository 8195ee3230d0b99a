"""Policy files against results recorded from ai-dynamo-runtime 1.5.1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo_es.router.config import KvRouterConfig

GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "router" / "config.json"
# Dynamo's list of what the document may hold lacks ``router``, which its later versions take, and ours.
ROOT_FIELDS = "`models`, `worker_selection`"
OUR_ROOT_FIELDS = "`models`, `worker_selection`, `router`"
# Where ours is better.
DEPARTURES = {
    # Dynamo reads as far as it must and finds fault with the name; ours says first that the text breaks off, and where.
    "not_yaml": "expected the node content, but found '<stream end>' at line 1 column 5, while parsing a flow node",
}
CASES = [case for case in json.loads(GOLDEN.read_text())["cases"] if case["kind"] == "policy_yaml"]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_policy_files_are_taken_and_refused_as_dynamo_does(case: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(case["yaml"])
    if "ok" in case["result"]:
        policy = KvRouterConfig(router_policy_config=str(path)).settings.policy
        assert policy is not None
        return
    error = case["result"]["error"]
    assert error["type"] == "ValueError"
    expected = error["message"].replace("<dir>", str(tmp_path)).replace(ROOT_FIELDS, OUR_ROOT_FIELDS)
    if case["name"] in DEPARTURES:
        expected = f"router_policy_config: failed to parse router policy config {path}: {DEPARTURES[case['name']]}"
    with pytest.raises(ValueError) as caught:
        KvRouterConfig(router_policy_config=str(path))
    assert str(caught.value) == expected

"""dynamo-es answers as ai-dynamo-runtime does: the same seeded random scripts on both, and no difference.

Off unless ``DYN_ES_REFERENCE_PYTHON`` names an interpreter that has the reference (CONTRIBUTING.md).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from dynamo_es import llm
from tests.conformance import hashing_scripts, radix_scripts, selection_scripts
from tests.conformance.conftest import Reference
from tests.conformance.script_player import play

pytestmark = pytest.mark.conformance

MakeScript = Callable[[Random], dict[str, Any]]
SHOWN_CHARS = 6000
# The reference rounds floats while it reads them, to show them in a refusal only, and gives up early on an exponent
# that is too large for any float. Both refuse them.
FLOATS = re.compile(r"floating point `[^`]*`|number out of range at line \d+ column \d+")
# What every call says after one of them has killed the thread that keeps the reference's tree.
DEAD = "RadixTree request was cancelled"


@pytest.mark.parametrize(
    ("make_script", "count"),
    [
        (radix_scripts.make_script, 2000),
        (hashing_scripts.make_script, 5000),
        (selection_scripts.make_script, 300),
        (selection_scripts.make_hostile_script, 600),
    ],
    ids=["radix", "hashing", "selection", "selection_arguments"],
)
def test_random_scripts_have_the_same_results(
    reference: Reference, seed: int, make_script: MakeScript, count: int
) -> None:
    seen: Counter[str] = Counter()
    for number in range(count):
        script = make_script(Random(f"{seed}/{number}"))
        theirs = comparable(reference.play(script))
        # Through JSON, as the reference's.
        ours = comparable(json.loads(json.dumps(play(llm, script))))[: len(theirs)]
        if ours != theirs:
            pytest.fail(describe(number, script, ours, theirs))
        seen.update(result["error"]["type"] if "error" in result else "ok" for result in theirs)
    # Scripts that are refused altogether would agree as well.
    assert seen["ok"] > seen.total() / 3
    assert seen["ok"] < seen.total() * 0.95
    print(f"{count} scripts, {seen.total()} steps: {dict(seen)}")


def comparable(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results that can be compared, without what is known to differ."""
    kept = []
    for result in results:
        error = result.get("error")
        if error is None:
            kept.append(result)
        elif error["message"] == DEAD:
            break
        else:
            kept.append({"error": {**error, "message": FLOATS.sub("a float", error["message"])}})
    return kept


def describe(number: int, script: dict[str, Any], ours: list[Any], theirs: list[Any]) -> str:
    """The first step with another result, and what led to it."""
    steps = script["steps"]
    place = next(place for place, result in enumerate(theirs) if ours[place] != result)
    before = "\n".join(json.dumps(step) for step in steps[:place])[-SHOWN_CHARS:]
    return (
        f"script {number}, step {place}: {json.dumps(steps[place])}\n"
        f"reference: {json.dumps(theirs[place])}\ndynamo-es: {json.dumps(ours[place])}\nafter\n{before}"
    )

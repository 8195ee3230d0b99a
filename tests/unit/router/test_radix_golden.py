"""``RadixTree`` against scripts recorded from ai-dynamo-runtime 1.5.1."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo_es.router.radix_tree import RadixTree

GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "router" / "radix.json"
SCRIPTS = json.loads(GOLDEN.read_text())["scripts"]


def to_bytes(value: Any) -> bytes:
    # Spaces behind commas and colons, as in the recording: refusals name columns.
    return json.dumps(value).encode()


def outcome(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"ok": call()}
    except Exception as error:
        return {"error": {"type": type(error).__name__, "message": str(error)}}


def found(tree: RadixTree, sequence: Any, early_exit: bool) -> dict[str, Any]:
    scores = tree.find_matches(sequence, early_exit)
    return {"scores": sorted([*worker, count] for worker, count in scores.scores.items()), "frequencies": []}


def play(tree: RadixTree, step: dict[str, Any]) -> Any:
    match step["op"]:
        case "apply":
            return tree.apply_event(step["worker_id"], to_bytes(step["event"]))
        case "apply_raw":
            return tree.apply_event(step["worker_id"], step["bytes_utf8"].encode())
        case "find":
            return found(tree, step["sequence"], step["early_exit"])
        case "remove_worker":
            return tree.remove_worker(step["worker_id"])
        case "clear_all_blocks":
            return tree.clear_all_blocks(step["worker_id"])
        case "dump":
            return [json.loads(text) for text in tree.dump_tree_as_events()]
    raise AssertionError(step)


def as_multiset(dump: list[dict[str, Any]]) -> Counter[str]:
    """The order of workers and siblings is not defined, and the event ids go with the order."""
    return Counter(json.dumps({**item, "event": {**item["event"], "event_id": None}}, sort_keys=True) for item in dump)


@pytest.mark.parametrize("script", SCRIPTS, ids=[script["name"] for script in SCRIPTS])
def test_every_step_answers_as_dynamo_did(script: dict[str, Any]) -> None:
    tree = RadixTree()
    for step in script["steps"]:
        answer = outcome(lambda step=step: play(tree, step))  # type: ignore[misc]
        if step["op"] == "dump":
            assert as_multiset(answer["ok"]) == as_multiset(step["result"]["ok"])
        else:
            assert answer == step["result"], step


@pytest.mark.parametrize("script", SCRIPTS, ids=[script["name"] for script in SCRIPTS])
def test_dump_rebuilds_the_tree_as_far_as_dynamo_s_does(script: dict[str, Any]) -> None:
    final = script["final"]
    tree = RadixTree()
    for step in script["steps"]:
        outcome(lambda step=step: play(tree, step))  # type: ignore[misc]
    dump = [json.loads(text) for text in tree.dump_tree_as_events()]
    assert as_multiset(dump) == as_multiset(final["dump_raw_order"])
    assert [item["event"]["event_id"] for item in dump] == list(range(len(dump)))

    copy = RadixTree()
    answers = [outcome(lambda item=item: copy.apply_event(item["worker_id"], to_bytes(item["event"]))) for item in dump]  # type: ignore[misc]
    assert [answer["error"] for answer in answers if "error" in answer] == final["replay_errors"]
    finds = [step for step in script["steps"] if step["op"] == "find" and "ok" in step["result"]]
    same = all(play(copy, step) == play(tree, step) for step in finds)
    assert same == final["find_same_after_replay"]
    redump = [json.loads(text) for text in copy.dump_tree_as_events()]
    assert (as_multiset(redump) == as_multiset(dump)) == final["redump_equal_as_set"]


def test_members_of_a_dump_stand_in_dynamo_s_order() -> None:
    tree = RadixTree()
    tree.apply_event(1, b'{"event_id":7,"data":{"stored":{"blocks":[{"tokens_hash":1,"block_hash":100}]}},"dp_rank":3}')
    assert tree.dump_tree_as_events() == [
        '{"worker_id":1,"storage_tier":"device","residency_domain":"worker","event":{"event_id":0,"data":{"stored":'
        '{"parent_hash":null,"start_position":null,"blocks":[{"block_hash":100,"tokens_hash":1,"mm_extra_info":null}]'
        '}},"dp_rank":3}}'
    ]

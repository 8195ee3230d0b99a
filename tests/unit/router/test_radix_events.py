"""JSON events of ``RadixTree``: what is taken and what is refused, as recorded from ai-dynamo-runtime 1.5.1."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_es.router.radix_events import ClearedBlocks, RadixEvent, RemovedBlocks, StoredBlocks, parse_event
from dynamo_es.router.radix_tree import RadixTree

GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "router" / "radix_event_json.json"
CASES = json.loads(GOLDEN.read_text())["cases"]
U64 = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize("case", CASES, ids=[str(number) for number in range(len(CASES))])
def test_event_is_taken_or_refused_in_the_words_of_dynamo(case: dict[str, Any]) -> None:
    data = case["utf8"].encode() if "utf8" in case else bytes.fromhex(case["hex"])
    try:
        answer = {"ok": RadixTree().apply_event(1, data)}
    except (ValueError, RuntimeError) as error:
        answer = {"error": {"type": type(error).__name__, "message": str(error)}}
    assert answer == case["result"]


BLOCKS = st.lists(st.tuples(U64, U64), max_size=5)


@st.composite
def events(draw: st.DrawFn) -> tuple[dict[str, Any], RadixEvent]:
    """An event as a document and as what it must be read as."""
    kind = draw(st.sampled_from(("stored", "removed", "cleared")))
    dp_rank = draw(st.none() | st.integers(0, 2**32 - 1))
    data: Any
    expected: StoredBlocks | RemovedBlocks | ClearedBlocks
    if kind == "stored":
        blocks = draw(BLOCKS)
        parent = draw(st.none() | U64)
        data = {"blocks": [{"block_hash": block, "tokens_hash": tokens} for block, tokens in blocks]}
        if parent is not None or draw(st.booleans()):
            data["parent_hash"] = parent
        if draw(st.booleans()):
            data["start_position"] = draw(st.none() | st.integers(0, 2**32 - 1))
        for block in data["blocks"]:
            if draw(st.booleans()):
                block["mm_extra_info"] = draw(st.sampled_from((None, {"mm_objects": [{"mm_hash": 1, "offsets": []}]})))
        expected = StoredBlocks(parent, [block for block, _ in blocks], array("Q", [tokens for _, tokens in blocks]))
    elif kind == "removed":
        hashes = draw(st.lists(U64, max_size=5))
        data, expected = {"block_hashes": hashes}, RemovedBlocks(hashes)
    else:
        data, expected = None, ClearedBlocks()
    tagged = "cleared" if kind == "cleared" and draw(st.booleans()) else {kind: data}
    event = {"event_id": draw(U64), "data": tagged}
    if dp_rank is not None:
        event["dp_rank"] = dp_rank
    if draw(st.booleans()):
        event["storage_tier"] = draw(st.sampled_from((None, "disk", [{"a": [1.5, "\ud800"]}])))
    return event, RadixEvent(dp_rank or 0, expected)


@given(event=events(), spaced=st.booleans(), name=st.sampled_from(("event_id", "data", "dp_rank")))
def test_any_event_is_read_and_a_member_twice_is_refused(
    event: tuple[dict[str, Any], RadixEvent], spaced: bool, name: str
) -> None:
    document, expected = event
    text = json.dumps(document, indent=1 if spaced else None)
    assert parse_event(text.encode()) == expected
    if name in document:
        again = f'{{"{name}": {json.dumps(document[name])}, {text.lstrip("{ ")}'
        with pytest.raises(ValueError, match=f"^Failed to deserialize KvCacheEvent: duplicate field `{name}` at line"):
            parse_event(again.encode())


@given(event=events(), data=st.data())
def test_a_number_out_of_range_is_refused_wherever_it_stands(
    event: tuple[dict[str, Any], RadixEvent], data: st.DataObject
) -> None:
    """Also where a plain event would be read by the faster reader."""
    text = json.dumps({"event_id": 5, "data": event[0]["data"], "dp_rank": 5})
    bad = data.draw(st.sampled_from(("-1", "-0", "1.0", "1e2", "18446744073709551616", '"1"', "true")))
    place = data.draw(st.sampled_from(('"event_id": ', '"dp_rank": ')))
    with pytest.raises(ValueError, match="Failed to deserialize KvCacheEvent: invalid "):
        parse_event(text.replace(f"{place}5", f"{place}{bad}").encode())


def test_nesting_that_nobody_reads_may_be_deep() -> None:
    depth = 100_000
    data = b'{"event_id":1,"x":' + b"[" * depth + b"]" * depth + b',"data":"cleared"}'
    assert parse_event(data) == RadixEvent(0, ClearedBlocks())


def test_long_text_is_cut_in_a_refusal() -> None:
    with pytest.raises(ValueError, match=r"variant `x{256}…`, expected one of") as caught:
        parse_event(b'{"event_id":1,"data":"' + b"x" * 100_000 + b'"}')
    assert len(str(caught.value)) < 500

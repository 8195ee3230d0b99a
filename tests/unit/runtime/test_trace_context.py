"""W3C trace context: what is taken from a client, and what goes on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_es.frontend.headers import read_headers
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.trace_context import MAX_STATE, TraceContext, parse_trace

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("parent", "flags"),
    [
        (GOOD, 1),
        (f"00-{TRACE}-{SPAN}-00", 0),
        (f"00-{TRACE}-{SPAN}-ff", 1),  # flags that nobody knows are not passed on
        (f"01-{TRACE}-{SPAN}-01", 1),
        (f"cc-{TRACE}-{SPAN}-00-what.comes.later", 0),
    ],
)
def test_what_follows_the_form_is_taken(parent: str, flags: int) -> None:
    found = parse_trace(parent)
    assert found == TraceContext(TRACE, SPAN, flags)
    assert found.traceparent == f"00-{TRACE}-{SPAN}-0{flags}"


@pytest.mark.parametrize(
    "parent",
    [
        "", "00", f"00-{TRACE}-{SPAN}", f"{GOOD}-", f"{GOOD}-more", f"ff-{TRACE}-{SPAN}-01", GOOD.upper(), f" {GOOD}",
        f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE[:-1]}g-{SPAN}-01", f"{GOOD}\n",
        f"01-{TRACE}-{SPAN}-01-{'x' * 300}", f"01-{TRACE}-{SPAN}-01-\n",
    ],
)  # fmt: skip
def test_anything_else_is_none(parent: str) -> None:
    assert parse_trace(parent) is None


@given(st.text(), st.text())
def test_no_text_is_too_much(parent: str, state: str) -> None:
    assert parse_trace(parent) is None or parent.startswith(GOOD[:2])
    found = parse_trace(GOOD, state)
    assert found is not None
    assert found.state in ("", state)


def test_the_state_of_others_goes_along_within_a_bound() -> None:
    assert parse_trace(GOOD, "a=1,b=2") == TraceContext(TRACE, SPAN, 1, "a=1,b=2")
    for state in ("x" * (MAX_STATE + 1), "a=\n", "a=\xe9"):
        assert parse_trace(GOOD, state) == TraceContext(TRACE, SPAN, 1)


def test_headers_of_a_request() -> None:
    parent = (b"traceparent", GOOD.encode())
    assert read_headers([parent]).trace == TraceContext(TRACE, SPAN, 1)
    states = [(b"tracestate", b"a=1"), (b"tracestate", b"b=2")]
    assert read_headers([*states, parent]).trace == TraceContext(TRACE, SPAN, 1, "a=1,b=2")
    for headers in ([], states, [parent, parent], [(b"traceparent", b"\xff")]):
        assert read_headers(headers).trace is None


def test_a_context_tells_its_trace_as_dynamos_does() -> None:
    context = Context("r")
    assert (context.trace_id, context.span_id, context.parent_span_id, context.trace_headers()) == (None,) * 4
    context.trace = TraceContext(TRACE, SPAN, 1, "a=1", "00f067aa0ba902b7")
    for one in (context, context.child(), context.detached("other")):
        assert (one.trace_id, one.span_id, one.parent_span_id) == (TRACE, SPAN, "00f067aa0ba902b7")
        assert one.trace_headers() == {"traceparent": GOOD, "tracestate": "a=1"}
    context.trace = TraceContext(TRACE, SPAN, 1)
    assert context.trace_headers() == {"traceparent": GOOD}

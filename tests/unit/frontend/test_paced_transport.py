"""What a connection is written through: the same bytes in the same order, in fewer writes."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_es.frontend.paced_transport import PACE_S, PacedTransport


class Handle:
    def __init__(self, at: float, number: int, work: Callable[[], object]) -> None:
        self.at, self.number, self.work, self.cancelled = at, number, work, False

    def cancel(self) -> None:
        self.cancelled = True

    def __lt__(self, other: Handle) -> bool:
        return (self.at, self.number) < (other.at, other.number)


class Loop:
    """Time that moves only when told to."""

    def __init__(self) -> None:
        self.now = 100.0
        self._numbers = itertools.count()
        self._handles: list[Handle] = []

    def time(self) -> float:
        return self.now

    def call_soon(self, work: Callable[[], object]) -> Handle:
        return self.call_at(self.now, work)

    def call_at(self, at: float, work: Callable[[], object]) -> Handle:
        handle = Handle(at, next(self._numbers), work)
        heapq.heappush(self._handles, handle)
        return handle

    def pass_time(self, seconds: float) -> None:
        """Run what is due until then; 0: what waits for the end of this turn."""
        end = self.now + seconds
        while self._handles and self._handles[0].at <= end:
            handle = heapq.heappop(self._handles)
            self.now = max(self.now, handle.at)
            if not handle.cancelled:
                handle.work()
        self.now = end

    @property
    def waiting(self) -> int:
        return sum(not handle.cancelled for handle in self._handles)


class Wire:
    """The transport below."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = ""

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.closed = "closed"

    def abort(self) -> None:
        self.closed = "aborted"


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def paced(loop: Loop, wire: Wire) -> PacedTransport:
    return PacedTransport(wire, loop)  # type: ignore[arg-type]


def test_a_head_goes_with_the_body_that_follows_it_at_once(loop: Loop, wire: Wire, paced: PacedTransport) -> None:
    paced.begin()
    paced.write(b"head")
    paced.write(b"body")
    assert wire.writes == []
    paced.flush()
    assert wire.writes == [b"headbody"]
    assert loop.waiting == 0


def test_a_head_that_nothing_follows_goes_by_the_end_of_the_turn(loop: Loop, wire: Wire, paced: PacedTransport) -> None:
    paced.begin()
    paced.write(b"head")
    loop.pass_time(0)
    assert wire.writes == [b"head"]


def test_the_first_token_is_not_held_back_behind_the_head(loop: Loop, wire: Wire, paced: PacedTransport) -> None:
    paced.begin()
    paced.write(b"head")
    loop.pass_time(0)
    paced.write(b"first")
    assert wire.writes == [b"head", b"first"]


def test_tokens_of_a_slow_stream_go_one_by_one(loop: Loop, wire: Wire, paced: PacedTransport) -> None:
    for number in range(3):
        paced.write(b"%d" % number)
        loop.pass_time(PACE_S)
    assert wire.writes == [b"0", b"1", b"2"]
    assert loop.waiting == 0


def test_tokens_of_a_fast_stream_go_together(loop: Loop, wire: Wire, paced: PacedTransport) -> None:
    for number in range(9):
        paced.write(b"%d" % number)
        loop.pass_time(0.28 * PACE_S)
    assert wire.writes == [b"0", b"123", b"4567"]
    loop.pass_time(PACE_S)
    assert wire.writes[3:] == [b"8"]


def test_the_end_of_an_answer_waits_for_nothing(loop: Loop, wire: Wire, paced: PacedTransport) -> None:
    paced.write(b"token")
    paced.write(b"end")
    paced.flush()
    assert wire.writes == [b"token", b"end"]
    paced.begin()
    paced.write(b"next head")
    loop.pass_time(0)
    assert wire.writes[2:] == [b"next head"]
    assert loop.waiting == 0


def test_much_is_written_at_once_so_that_flow_control_sees_it(wire: Wire, paced: PacedTransport) -> None:
    paced.write(b"x")
    for _ in range(5):
        paced.write(b"y" * 20_000)
    assert [len(data) for data in wire.writes] == [1, 80_000]


def test_what_waits_goes_before_a_close_and_not_before_an_abort(loop: Loop, wire: Wire, paced: PacedTransport) -> None:
    paced.write(b"token")
    paced.write(b"end")
    paced.close()
    assert (wire.writes, wire.closed) == ([b"token", b"end"], "closed")
    other = Wire()
    paced = PacedTransport(other, loop)  # type: ignore[arg-type]
    paced.write(b"token")
    paced.write(b"never")
    paced.abort()
    assert (other.writes, other.closed) == ([b"token"], "aborted")
    loop.pass_time(1)
    assert other.writes == [b"token"]


def test_nothing_is_written_to_a_connection_that_is_lost(loop: Loop, wire: Wire, paced: PacedTransport) -> None:
    paced.write(b"token")
    paced.write(b"never")
    paced.drop()
    loop.pass_time(1)
    assert wire.writes == [b"token"]
    assert loop.waiting == 0


STEPS = st.one_of(
    st.binary(min_size=1, max_size=40_000),
    st.sampled_from(["begin", "flush"]),
    st.floats(0, 3 * PACE_S).map(lambda seconds: seconds),
)


@given(st.lists(STEPS, max_size=30))
def test_the_bytes_are_the_same_whatever_the_pace(steps: list[bytes | str | float]) -> None:
    loop, wire = Loop(), Wire()
    paced = PacedTransport(wire, loop)  # type: ignore[arg-type]
    for step in steps:
        if isinstance(step, bytes):
            paced.write(step)
        elif isinstance(step, float):
            loop.pass_time(step)
        else:
            getattr(paced, step)()
    loop.pass_time(PACE_S)
    assert b"".join(wire.writes) == b"".join(step for step in steps if isinstance(step, bytes))
    assert loop.waiting == 0

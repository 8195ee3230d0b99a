"""Events for which the log's buffer has no room: what others wait for is told later, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from dynamo_es.router import event_outlet
from dynamo_es.router.event_outlet import EventOutlet
from schemas.requests import Finished, PrefillCompleted, Routed


def finished(name: str) -> Finished:
    return Finished(1, name, 1, 7, "ok", 1, 1, 1)


def routed(name: str) -> Routed:
    return Routed(1, name, 1, 7, "m", "kv", 1, 0, 4, 12, b"", b"", 0, 0, 12, [], "", [], 1)


class Buffer:
    """An outlet with a sink of ``room`` events and timers that a test runs."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.taken: list[msgspec.Struct] = []
        self.timers: list[Callable[[], None]] = []
        self.caught_up: list[bool] = []
        self.outlet = EventOutlet(self, self.timers.append, lambda: self.caught_up.pop(0) if self.caught_up else True)

    def offer(self, topic: Any, key: bytes, event: msgspec.Struct | None) -> bool:
        if len(self.taken) >= self.room:
            return False
        assert event is not None
        self.taken.append(event)
        return True

    def wake(self) -> None:
        (work,) = self.timers
        self.timers.clear()
        work()


def test_with_room_everything_is_told_at_once() -> None:
    buffer = Buffer(room=9)
    events = [routed("a"), PrefillCompleted(1, "a", 1, 7), finished("a")]
    assert buffer.outlet.tell(events[0])
    for event in events[1:]:
        buffer.outlet.owe(event)
    assert buffer.taken == events
    assert (buffer.timers, buffer.outlet.refused) == ([], 0)


def test_what_is_owed_is_told_in_order_and_decisions_wait_behind_it() -> None:
    buffer = Buffer(room=0)
    for name in "ab":
        buffer.outlet.owe(finished(name))
    assert len(buffer.timers) == 1
    buffer.room = 1
    buffer.wake()
    assert buffer.taken == [finished("a")]
    buffer.room = 9
    # There is room again, but "b" comes first: "b" could be a request id that is used again.
    assert not buffer.outlet.tell(routed("b"))
    buffer.outlet.owe(finished("c"))
    assert buffer.taken == [finished("a")]
    buffer.caught_up = [False, True]
    buffer.wake()
    assert buffer.taken == [finished(name) for name in "abc"]
    assert buffer.outlet.tell(routed("b"))
    # Not all decisions were taken: it asks once more.
    buffer.wake()
    assert buffer.timers == []
    assert buffer.outlet.refused == 1


def test_no_more_is_kept_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_outlet, "MAX_OWED", 2)
    buffer = Buffer(room=0)
    for name in "abc":
        buffer.outlet.owe(finished(name))
    buffer.room = 9
    buffer.wake()
    assert buffer.taken == [finished("a"), finished("b")]

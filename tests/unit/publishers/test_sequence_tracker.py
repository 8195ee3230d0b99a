from __future__ import annotations

from dynamo_es.publishers.zmq_relay import Arrival, SequenceTracker


def live(tracker: SequenceTracker, seq: int, payload: bytes = b"x") -> Arrival:
    arrival = tracker.classify(seq, payload)
    if arrival in (Arrival.NEXT, Arrival.GAP):
        tracker.advance(seq)
    return arrival


def test_a_dense_sequence_is_next_and_a_jump_is_a_gap() -> None:
    tracker = SequenceTracker()
    assert [live(tracker, seq) for seq in (0, 1, 4, 5)] == [Arrival.NEXT, Arrival.NEXT, Arrival.GAP, Arrival.NEXT]


def test_joining_late_is_a_gap_from_the_start() -> None:
    tracker = SequenceTracker()
    assert live(tracker, 7) is Arrival.GAP


def test_EVT_04_a_sequence_that_does_not_rise_is_a_restart() -> None:
    for again in (0, 1, 2):
        tracker = SequenceTracker()
        for seq in range(3):
            live(tracker, seq)
        assert live(tracker, again) is Arrival.RESTART
        assert tracker.next_seq == 0
        assert live(tracker, again) is (Arrival.NEXT if again == 0 else Arrival.GAP)


def test_what_was_replayed_is_stale_when_it_comes_live() -> None:
    tracker = SequenceTracker()
    live(tracker, 0)
    for seq in (1, 2, 3):
        tracker.advance_replayed(seq, b"payload %d" % seq)
    assert [live(tracker, seq, b"payload %d" % seq) for seq in (2, 3)] == [Arrival.STALE, Arrival.STALE]
    assert live(tracker, 4) is Arrival.NEXT


def test_another_batch_under_a_replayed_number_is_a_restart() -> None:
    tracker = SequenceTracker()
    for seq in range(3):
        tracker.advance_replayed(seq, b"old %d" % seq)
    assert live(tracker, 0, b"new") is Arrival.RESTART
    assert live(tracker, 0, b"new") is Arrival.NEXT
    assert live(tracker, 1, b"old 1") is Arrival.NEXT

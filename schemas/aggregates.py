"""Topic ``aggregates``: what the stream processors count and sum up, for each source partition and window of time.

A window is cut by the time of the records that it counts, whenever they were read. Every value carries
``next_offset``: it covers all records of its source partition below that offset, so whoever reads on from there counts
nothing twice. A window that is written again replaces itself; a window that is no longer kept is deleted. Requests of
one worker are spread over the partitions of ``requests``: add the windows of all partitions up (sums and counts add,
maxima compare). All records of a source partition are in the partition of the same number, modulo the count of this
topic; ``progress`` comes after the windows that it covers.
"""

from __future__ import annotations

import msgspec

from schemas.numbers import Positive, Unsigned
from schemas.topic import Cleanup, TopicSpec


class RequestLoad(msgspec.Struct, tag="request-load", array_like=True, gc=False):
    """Requests of one rank in one window: routed in it, or ended in it.

    Attributes:
        version: Layout version.
        partition: Of ``requests``.
        next_offset: Every record of that partition below it is counted.
        window_start_ms, window_ms: The window, in the log's time.
        model, worker_id, dp_rank: Where the requests were routed to.
        routed: Decisions.
        prompt_tokens, cached_tokens: Of the routed requests: length, and how much of it was cached there.
        ok, cancelled, error, migrated: Requests that finished, by outcome.
        unfinished: Requests given up as open: their router's lease ended (as far as this partition tells), or they are
            open for longer than windows are kept.
        output_tokens: Of the finished requests.
        first_tokens: Finished requests that had a first token.
        first_token_ms_sum, first_token_ms_max: Time from the decision to it, over those.
        duration_ms_sum: Time from the decision to the end, over finished requests that tell it.
    """

    version: int
    partition: Unsigned
    next_offset: Unsigned
    window_start_ms: int
    window_ms: Positive
    model: str
    worker_id: Unsigned
    dp_rank: Unsigned
    routed: Unsigned = 0
    prompt_tokens: Unsigned = 0
    cached_tokens: Unsigned = 0
    ok: Unsigned = 0
    cancelled: Unsigned = 0
    error: Unsigned = 0
    migrated: Unsigned = 0
    unfinished: Unsigned = 0
    output_tokens: Unsigned = 0
    first_tokens: Unsigned = 0
    first_token_ms_sum: Unsigned = 0
    first_token_ms_max: Unsigned = 0
    duration_ms_sum: Unsigned = 0

    @property
    def first_token_ms_mean(self) -> float | None:
        """Mean time to the first token in ms; None if there was none."""
        return self.first_token_ms_sum / self.first_tokens if self.first_tokens else None


class PassLoad(msgspec.Struct, tag="pass-load", array_like=True, gc=False):
    """Forward passes of one rank in one window. ``partition`` and ``next_offset`` are those of ``forward-pass``.

    Attributes:
        version: Layout version.
        window_start_ms, window_ms: The window, in the log's time.
        incarnation, counter: Newest message that is counted.
        passes, heartbeats: Messages of passes, and of an idle engine.
        missed: Messages that the rank numbered and that never came.
        duplicates: Messages that came again, and count nowhere else.
        wall_time_s: Time that the passes took.
        prefill_tokens, decode_requests: Scheduled, summed over the passes.
        waiting_max: Most requests that waited at a pass.
    """

    version: int
    partition: Unsigned
    next_offset: Unsigned
    window_start_ms: int
    window_ms: Positive
    model: str
    worker_id: Unsigned
    dp_rank: Unsigned
    incarnation: Unsigned = 0
    counter: Unsigned = 0
    passes: Unsigned = 0
    heartbeats: Unsigned = 0
    missed: Unsigned = 0
    duplicates: Unsigned = 0
    wall_time_s: float = 0.0
    prefill_tokens: Unsigned = 0
    decode_requests: Unsigned = 0
    waiting_max: Unsigned = 0


class MeasuredLoad(msgspec.Struct, tag="measured-load", array_like=True, gc=False):
    """Load that one rank measured on itself in one window; ``worker-load`` is compacted, so older windows thin out.

    Attributes:
        version: Layout version.
        partition, next_offset: Of ``worker-load``, as in ``request-load``.
        window_start_ms, window_ms: The window, in the log's time.
        incarnation, at_ms: Newest measurement that is counted, with the worker's own time.
        samples: Measurements.
        used_blocks_samples: How many of them knew the blocks in use.
        used_blocks_sum, used_blocks_max: Of those.
        total_blocks: Newest capacity that was told; 0: none.
        running_max, waiting_max: Most requests in the engine.
    """

    version: int
    partition: Unsigned
    next_offset: Unsigned
    window_start_ms: int
    window_ms: Positive
    model: str
    worker_id: Unsigned
    dp_rank: Unsigned
    incarnation: Unsigned = 0
    at_ms: Unsigned = 0
    samples: Unsigned = 0
    used_blocks_samples: Unsigned = 0
    used_blocks_sum: Unsigned = 0
    used_blocks_max: Unsigned = 0
    total_blocks: Unsigned = 0
    running_max: Unsigned = 0
    waiting_max: Unsigned = 0


class KvSourceCounts(msgspec.Struct, tag="kv-source-counts", array_like=True, gc=False):
    """Batches of KV events of one source in one window, and what was wrong with them.

    Attributes:
        version: Layout version.
        partition, next_offset: Of ``kv-events``, as in ``request-load``.
        window_start_ms, window_ms: The window, in the log's time.
        batches: All that came.
        duplicates: Batches that had been applied before.
        stragglers: Batches of an incarnation that is over.
        gaps: How often batches were missing.
        missing_batches: How many were.
        skipped_batches: Batches not applied, because some before them were missing.
    """

    version: int
    partition: Unsigned
    next_offset: Unsigned
    window_start_ms: int
    window_ms: Positive
    model: str
    worker_id: Unsigned
    dp_rank: Unsigned
    batches: Unsigned = 0
    duplicates: Unsigned = 0
    stragglers: Unsigned = 0
    gaps: Unsigned = 0
    missing_batches: Unsigned = 0
    skipped_batches: Unsigned = 0


class RejectedRecords(msgspec.Struct, tag="rejected-records", array_like=True, gc=False):
    """Records of one source partition that went to ``dead-letters`` in one window, by reason.

    Attributes:
        version: Layout version.
        topic, partition: Where they stand; the topic without its namespace.
        next_offset: As in ``request-load``.
        window_start_ms, window_ms: The window, in the log's time.
        reason: As in ``dead-letters``.
        records: How many.
    """

    version: int
    topic: str
    partition: Unsigned
    next_offset: Unsigned
    window_start_ms: int
    window_ms: Positive
    reason: str
    records: Unsigned = 0


class Progress(msgspec.Struct, tag="progress", array_like=True, gc=False):
    """How far one source partition is covered. The windows as they stand cover everything below ``next_offset``.

    Attributes:
        version: Layout version.
        topic, partition: The source; the topic without its namespace.
        topic_id: Of the source: windows of a topic that was deleted are void.
        fold_version: Of the fold that counted.
        next_offset: First offset that is not covered.
        replay_from: Where a processor without state reads on from; at most ``next_offset``: what is still open began
            there.
        newest_ms: Newest time that was seen.
        written_by: Who, for people.
    """

    version: int
    topic: str
    partition: Unsigned
    topic_id: str
    fold_version: Unsigned
    next_offset: Unsigned
    replay_from: Unsigned
    newest_ms: int
    written_by: str


RankWindow = RequestLoad | PassLoad | MeasuredLoad | KvSourceCounts
Window = RankWindow | RejectedRecords
AggregateRecord = Window | Progress

AGGREGATES = TopicSpec(
    name="aggregates",
    version=1,
    value=AggregateRecord,
    key="<topic>/<partition>/<window_start_ms>+<window_ms>/rank/<model>/<worker_id>:<dp_rank>, "
    "<topic>/<partition>/<window_start_ms>+<window_ms>/rejected/<reason> or <topic>/<partition>/progress",
    partitions=8,
    cleanup=Cleanup.COMPACTION,
    description="Load and anomaly counts by window of time, summed up by the stream processors.",
)


def key_rank_window(topic: str, window: RankWindow) -> bytes:
    """Record key of one rank's window. ``topic``: the source, without its namespace."""
    return (
        f"{topic}/{window.partition}/{window.window_start_ms}+{window.window_ms}/rank/"
        f"{window.model}/{window.worker_id}:{window.dp_rank}"
    ).encode()


def key_rejected_records(window: RejectedRecords) -> bytes:
    """Record key of the count of refused records."""
    return (
        f"{window.topic}/{window.partition}/{window.window_start_ms}+{window.window_ms}/rejected/{window.reason}"
    ).encode()


def key_progress(topic: str, partition: int) -> bytes:
    """Record key of a source partition's progress."""
    return f"{topic}/{partition}/progress".encode()

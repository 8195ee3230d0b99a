"""What a process knows of the caches of a model's workers, and how it routes by them: an entry of ``/health``, which
``dynamo-es diagnose`` reads. Pure.

A later version may add members; readers take what they know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.candidates import ranks_of_card
from schemas.registry import ModelCard, ResyncAsked, key_resync
from streams.kv_index_state import KvIndexState, Source, SourceKey

RankState = Literal["exact", "degraded", "silent", "retired", "other-block-size"]
IndexKind = Literal["own", "remote", "approximate", "none"]
MAX_LISTED_RANKS = 10
"""Ranks that are named a model; how many there are is always told."""


class RankReport(msgspec.Struct, omit_defaults=True):
    """One rank of a worker, and what is known of its cache.

    Attributes:
        state: ``exact``: all of it; ``degraded``: events are missing, so that it counts as empty; ``silent``: no event
            was ever seen; ``retired``: its events ended; ``other-block-size``: it cannot be compared with prompts.
        blocks: Blocks that it holds, in all tiers.
        block_size: Tokens a block, if it is not the router's.
        other_model: Its events stand under this model's name instead.
        asked: How often it was asked to announce its state again and has not.
    """

    worker_id: int
    dp_rank: int
    state: RankState
    blocks: int = 0
    block_size: int = 0
    other_model: str = ""
    asked: int = 0


class RankCounts(msgspec.Struct, omit_defaults=True):
    """Ranks of a model's workers by state; ``empty``: exact, and without a single block."""

    total: int = 0
    exact: int = 0
    empty: int = 0
    degraded: int = 0
    silent: int = 0
    retired: int = 0
    other_block_size: int = 0


class RoutingReport(msgspec.Struct):
    """How requests for one model are routed, and what came of it since the process began.

    Attributes:
        mode: Router mode in use.
        takes_text: Its workers get text, so that no prompt is known here.
        generates: Its workers keep KV caches at all.
        block_size: Tokens a block, of the router.
        index: Whence the router knows of caches: its own fold of KV events, other processes' (``remote``), what it
            sent where (``approximate``), or nothing.
        overlap_credit: ``--router-kv-overlap-score-credit``; 0: caches count for nothing.
        decisions: By reason (``dynamo_es.router.decision_reasons``).
        queried_blocks, matched_blocks, selected_blocks: Blocks of prompts; those that the best candidate had; those
            that the chosen one had.
        ranks: None: this process has no index of its own.
        untrusted: Ranks that are not exact, at most ``MAX_LISTED_RANKS``.
    """

    mode: str
    takes_text: bool
    generates: bool
    block_size: int
    index: IndexKind
    overlap_credit: float
    decisions: dict[str, int]
    queried_blocks: int
    matched_blocks: int
    selected_blocks: int
    ranks: RankCounts | None = None
    untrusted: list[RankReport] = []


def rank_reports(
    model: str,
    cards: Iterable[ModelCard],
    block_size: int,
    index: KvIndexState,
    resyncs: Mapping[bytes, ResyncAsked],
) -> list[RankReport]:
    """Every rank that these cards name, as the index knows it. ``resyncs``: open questions, by record key."""
    index.settle()  # what is noted and not counted yet
    found = []
    silent: dict[int, list[RankReport]] = {}
    for card in cards:
        for rank in ranks_of_card(card):
            key = SourceKey(model, rank.worker_id, rank.dp_rank)
            report = _report(rank, index.sources.get(key), card.kv_cache_block_size, block_size)
            if report.state == "degraded":
                asked = resyncs.get(key_resync(*key))
                report.asked = 0 if asked is None else asked.attempt
            elif report.state in ("silent", "retired"):
                silent.setdefault(rank.worker_id, []).append(report)
            found.append(report)
    if silent:
        for other in index.sources.values():
            if other.key.model != model and not other.retired:
                for report in silent.get(other.key.worker_id, ()):
                    report.other_model = other.key.model
    return found


def count_ranks(reports: Iterable[RankReport]) -> RankCounts:
    """How many there are of each state."""
    counts = RankCounts()
    for report in reports:
        counts.total += 1
        name = report.state.replace("-", "_")
        setattr(counts, name, getattr(counts, name) + 1)
        counts.empty += report.state == "exact" and not report.blocks
    return counts


def _report(rank: WorkerRank, source: Source | None, registered: int, block_size: int) -> RankReport:
    report = RankReport(rank.worker_id, rank.dp_rank, "silent")
    if source is not None:
        report.blocks = sum(source.counts)
        report.state = "retired" if source.retired else "exact" if source.exact else "degraded"
    # What it publishes counts, and before the first event what it registered.
    size = registered if source is None or source.retired else source.block_size
    if size and size != block_size:
        report.state, report.block_size = "other-block-size", size
    return report

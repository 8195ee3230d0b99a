"""The index equals a brute-force model over histories of any kind: repeated and late batches, gaps, resets, restarts,
workers that leave and come back, all tiers, commits, sweeps; live, replayed, restarted and from a snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_es.router.hashing import hash_prompt
from schemas.columns import pack_u64
from schemas.kv_events import (
    TIERS,
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    KvEvents,
    SourceRetired,
    Tier,
)
from streams.kv_index import KvIndexFold
from streams.kv_index_state import KvIndexState
from streams.testing import FoldDriver
from tests.support.index_views import match_everywhere

BLOCK = 4
SOURCES = ((1, 0), (1, 1), (2, 0))
LETTERS = "ABC"


def chain_of(text: str) -> list[int]:
    return hash_prompt([ord(letter) * 10 + offset for letter in text for offset in range(BLOCK)], BLOCK)[1]


@dataclass
class ModelSource:
    """What a reader must believe of one source. ``held``: sequence hashes by tier; empty unless ``exact``."""

    incarnation: int | None = None
    next_seq: int = 0
    exact: bool = False
    gone: set[int] = field(default_factory=set)
    held: dict[Tier, set[int]] = field(default_factory=lambda: {tier: set() for tier in TIERS})

    def void(self) -> None:
        for blocks in self.held.values():
            blocks.clear()

    def apply(self, batch: KvEvents) -> None:
        if batch.incarnation in self.gone:
            return
        if batch.incarnation != self.incarnation:
            if self.incarnation is not None:
                self.gone.add(self.incarnation)
            self.incarnation, self.next_seq, self.exact = batch.incarnation, 0, False
            self.void()
        if batch.seq < self.next_seq:
            return
        follows = batch.seq == self.next_seq and (self.exact or batch.seq == 0)
        self.next_seq = batch.seq + 1
        self.exact = batch.reset or follows
        if batch.reset or not follows:
            self.void()
        if self.exact:
            for event in batch.events:
                self.change(event)

    def change(self, event: KvEvent) -> None:
        if isinstance(event, BlocksStored):
            self.held[event.tier].update(unpack(event.sequence_hashes))
        elif isinstance(event, BlocksRemoved):
            self.held[event.tier].difference_update(unpack(event.sequence_hashes))
        else:
            self.void()

    def retire(self, incarnation: int) -> None:
        if incarnation == self.incarnation and incarnation not in self.gone:
            self.gone.add(incarnation)
            self.void()

    def depths(self, chain: Sequence[int]) -> tuple[int, int, int]:
        """Blocks of a prompt in device memory, then in the host's, then on disk or beyond."""
        found, start = [], 0
        for tier in TIERS:
            end = start
            while end < len(chain) and chain[end] in self.held[tier]:
                end += 1
            found.append(end - start)
            start = end
        device, host, disk, external = found
        return device, host, disk + external


def unpack(column: bytes) -> list[int]:
    return [int.from_bytes(column[at : at + 8], "little") for at in range(0, len(column), 8)]


class Writer:
    """The publisher of one source: numbers its batches, and remembers them so that they can come again."""

    def __init__(self, worker_id: int, dp_rank: int) -> None:
        self.worker_id, self.dp_rank = worker_id, dp_rank
        self.incarnation, self.seq = 1, 0
        self.sent: list[KvEvents] = []

    def batch(self, events: Sequence[KvEvent], *, reset: bool = False, skip: int = 0) -> KvEvents:
        self.seq += skip
        batch = KvEvents(1, "m", self.worker_id, self.dp_rank, self.incarnation, self.seq, BLOCK, reset, list(events))
        self.seq += 1
        self.sent.append(batch)
        return batch

    def restart(self) -> None:
        self.incarnation, self.seq = self.incarnation + 1, 0


TEXTS = st.text(LETTERS, min_size=1, max_size=5)
EVENTS = st.one_of(
    st.builds(
        lambda tier, text, start: BlocksStored(
            tier,
            chain_of(text)[start - 1] if 0 < start < len(text) else None,
            *[pack_u64(chain_of(text)[start % len(text) :])] * 2,
        ),
        st.sampled_from((*TIERS, "device", "device")), TEXTS, st.integers(0, 4),
    ),
    st.builds(
        lambda tier, text, place: BlocksRemoved(tier, pack_u64([chain_of(text)[place % len(text)]])),
        st.sampled_from((*TIERS, "device", "device")), TEXTS, st.integers(0, 4),
    ),
    st.just(AllBlocksCleared()),
)  # fmt: skip
BATCHES = st.lists(EVENTS, max_size=3)
# One of these is drawn, the more often the more often it stands here.
KINDS = (
    *["send"] * 12, *["commit"] * 5, *["again"] * 2, "reset", "gap", "restart", "restart late", "retire", "sweep",
)  # fmt: skip
# Which source, what, with which events; a number chooses what comes again.
STEPS = st.tuples(st.integers(0, len(SOURCES) - 1), st.sampled_from(KINDS), BATCHES, st.integers(0, 99))
# Hypothesis likes lists short: without a least length most have five steps.
HISTORIES = st.lists(STEPS, min_size=12, max_size=60)
History = list[tuple[int, str, list[KvEvent], int]]


def play(driver: FoldDriver[KvIndexState], history: History) -> dict[tuple[int, int], ModelSource]:
    """A history on the fold and on the model."""
    writers = [Writer(*source) for source in SOURCES]
    models = {source: ModelSource() for source in SOURCES}
    for which, kind, events, number in history:
        writer, model = writers[which], models[SOURCES[which]]
        if kind == "commit":
            driver.commit()
        elif kind == "sweep":
            while driver.fold.housekeep(driver.state):
                pass
        elif kind == "retire":
            # Of the incarnation that is running, or of the one before.
            incarnation = writer.incarnation - number % 2
            driver.feed(
                KvEvents(
                    1, "m", writer.worker_id, writer.dp_rank, incarnation, 0, BLOCK, False, [SourceRetired("gone")]
                )
            )
            model.retire(incarnation)
        else:
            batch = next_batch(writer, kind, events, number)
            if batch is not None:
                driver.feed(batch)
                model.apply(batch)
    return models


def next_batch(writer: Writer, kind: str, events: list[KvEvent], number: int) -> KvEvents | None:
    if kind == "again":
        # Any earlier batch: of this incarnation or of one that is over.
        return writer.sent[number % len(writer.sent)] if writer.sent else None
    if kind in ("restart", "restart late"):
        writer.restart()
    # A batch that is numbered too high: the ones before it are lost.
    return writer.batch(events, reset=kind == "reset", skip=2 if kind in ("gap", "restart late") else 0)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(HISTORIES, st.lists(st.text(LETTERS, min_size=1, max_size=6), min_size=1, max_size=4))
def test_any_history_gives_what_the_model_says(history: History, queries: list[str]) -> None:
    driver = FoldDriver(KvIndexFold())
    models = play(driver, history)
    for query in queries:
        chain = chain_of(query)
        depths = {source: model.depths(chain) for source, model in models.items()}
        assert match_everywhere(driver, chain) == {source: found for source, found in depths.items() if any(found)}
    # The tables hold what is cached and nothing else, once what is dead is swept.
    while driver.fold.housekeep(driver.state):
        pass
    held = [sum(len(model.held[tier]) for model in models.values()) for tier in TIERS]
    index = driver.state.models.get("m")
    assert (index.tier_blocks if index is not None else [0] * len(TIERS)) == held
    assert driver.rejected == []


@settings(max_examples=100, deadline=None, derandomize=True)
@given(HISTORIES)
def test_a_source_is_trusted_exactly_while_nothing_is_missing(history: History) -> None:
    driver = FoldDriver(KvIndexFold())
    models = play(driver, history)
    for view in (driver, driver.replayed(), driver.restarted()):
        for key, source in view.state.sources.items():
            model = models[key.worker_id, key.dp_rank]
            if source.retired:
                assert model.incarnation in model.gone
            else:
                assert (source.incarnation, source.next_seq, source.exact) == (
                    model.incarnation, model.next_seq, model.exact
                )  # fmt: skip

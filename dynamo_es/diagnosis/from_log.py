"""What the log tells of models, caches and recent decisions. Reads only."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from functools import partial

from dynamo_es.diagnosis.facts import LoggedFacts, LoggedModel
from dynamo_es.diagnosis.recent_decisions import RecentDecisions
from dynamo_es.frontend.contracts import TEXT
from dynamo_es.frontend.membership import Membership, endpoint_of, settle_membership
from dynamo_es.frontend.servable import generates
from dynamo_es.log.base import EventLog, Record, TopicPartition
from dynamo_es.log.errors import LogUnavailable
from dynamo_es.router.routing_report import MAX_LISTED_RANKS, RankReport, RoutingReport, count_ranks, rank_reports
from dynamo_es.runtime.letter_box import LetterBox, LetterFilter
from dynamo_es.runtime.letters import printable
from schemas.codec import SchemaError, TopicCodec
from schemas.dead_letters import DeadLetter
from schemas.kv_events import KV_EVENTS
from schemas.registry import ModelCard, key_instance
from schemas.requests import REQUESTS, Routed
from streams.kv_index import KvIndexFold
from streams.kv_index_state import KvIndexState
from streams.refold import refold
from streams.registry import RegistryFold, RegistryState

MAX_DECISIONS = 20_000
"""Newest records of each partition of ``requests`` that are read."""
_AT_A_TIME = 1_000
"""Records that are in memory at a time."""
_MAX_LETTERS = 1_000
_MAX_KEY = 128
"""Characters of a key that are told."""
_POLL_S = 1.0
_READ_TIMEOUT_S = 30.0


async def read_log(log: EventLog, namespace: str, since_ms: int) -> LoggedFacts:
    """Fold registry and KV events, and read the decisions since ``since_ms``.

    Raises:
        LogError: The log is away, or has no such topics.
    """
    registry, _ = await refold(RegistryFold(), log, namespace)
    index, _ = await refold(KvIndexFold(), log, namespace)
    recent = await _decisions(log, namespace, since_ms)
    models = {
        name: _model(name, membership, registry, index, recent.get(name, RecentDecisions()))
        for name, membership in _memberships(registry)
    }
    return LoggedFacts(models, await _unknown_versions(log, namespace, since_ms))


def _memberships(registry: RegistryState) -> Iterator[tuple[str, Membership]]:
    groups: dict[str, list[ModelCard]] = {}
    for card in registry.models.values():
        if not card.suffix:
            groups.setdefault(card.display_name, []).append(card)
    for name, cards in groups.items():
        yield name, settle_membership(cards, None, partial(_is_serving, registry), partial(_age, registry))


def _age(registry: RegistryState, card: ModelCard) -> int:
    lease = registry.leases.get(card.lease_id)
    return 0 if lease is None else lease.renewal


def _is_serving(registry: RegistryState, card: ModelCard) -> bool:
    instance = registry.instances.get(key_instance(*endpoint_of(card), card.instance_id))
    return instance is not None and instance.state == "serving"


def _model(
    name: str, membership: Membership, registry: RegistryState, index: KvIndexState, recent: RecentDecisions
) -> LoggedModel:
    card = membership.card
    cards = {**membership.members, **membership.helpers}.values()
    serving = [card for card in cards if _is_serving(registry, card)]
    block_size = _common_block_size(serving) or card.kv_cache_block_size
    ranks: list[RankReport] = []
    if generates(card):
        computing = [card for card in serving if card.worker_type == "prefill"] or serving
        ranks = rank_reports(name, computing, block_size, index, registry.resyncs)
    routing = RoutingReport(
        mode=recent.mode,
        takes_text=card.model_input == TEXT,
        generates=generates(card),
        block_size=block_size,
        index="own",
        overlap_credit=1.0,
        decisions=dict(recent.decisions),
        queried_blocks=recent.queried_blocks,
        matched_blocks=recent.matched_blocks,
        selected_blocks=recent.selected_blocks,
        ranks=count_ranks(ranks),
        untrusted=[rank for rank in ranks if rank.state != "exact"][:MAX_LISTED_RANKS],
    )
    return LoggedModel(routing, ranks, len(serving))


def _common_block_size(cards: Iterable[ModelCard]) -> int:
    """The size that most workers have: which one a router takes is not in the log."""
    counts = Counter(card.kv_cache_block_size for card in cards if card.kv_cache_block_size)
    return counts.most_common(1)[0][0] if counts else 0


async def _decisions(log: EventLog, namespace: str, since_ms: int) -> Mapping[str, RecentDecisions]:
    topic = REQUESTS.qualified(namespace)
    starts: dict[TopicPartition, int] = {}
    ends: dict[TopicPartition, int] = {}
    for number, limits in (await log.bounds(topic)).items():
        place = TopicPartition(topic, number)
        start = max(limits.start, await log.offset_at(place, since_ms), limits.end - MAX_DECISIONS)
        if start < limits.end:
            starts[place], ends[place] = start, limits.end
    codec, found = TopicCodec(REQUESTS), dict[str, RecentDecisions]()
    async with contextlib.aclosing(_records(log, starts, ends)) as records:
        async for record in records:
            try:
                event = codec.decode(record.value or b"", record.headers)
            except SchemaError:
                continue  # whoever folds it has set it aside
            # What computes a prompt for another worker, and that one, are two decisions; only the first is by cache.
            if isinstance(event, Routed) and event.stage != "decode":
                found.setdefault(event.model, RecentDecisions()).add(event, record.timestamp_ms)
    return found


async def _records(
    log: EventLog, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
) -> AsyncGenerator[Record, None]:
    """Raises ``LogUnavailable``: they do not arrive."""
    if not starts:
        return
    reader, loop = log.reader(starts), asyncio.get_running_loop()
    deadline = loop.time() + _READ_TIMEOUT_S
    try:
        while any(reader.positions()[place] < end for place, end in ends.items()):
            if loop.time() > deadline:
                raise LogUnavailable(f"records of {next(iter(starts)).topic} do not arrive")
            for place, records in (await reader.poll(max_records=_AT_A_TIME, timeout_s=_POLL_S)).items():
                for record in records:
                    if record.offset < ends[place]:
                        yield record
    finally:
        await reader.close()


async def _unknown_versions(log: EventLog, namespace: str, since_ms: int) -> Mapping[str, int]:
    """KV-event records of another version, by record key, which names model, worker and rank."""
    counts: Counter[str] = Counter()
    seen: set[tuple[int, int]] = set()
    box = LetterBox(log, namespace)
    await box.open()
    try:
        wanted = LetterFilter(KV_EVENTS.name, "unknown_version", since_ms)
        async with contextlib.aclosing(box.newest(wanted)) as letters:
            async for found in letters:
                letter = found.letter
                # Every reader that refused a record has written a letter.
                if isinstance(letter, DeadLetter) and (letter.partition, letter.offset) not in seen:
                    seen.add((letter.partition, letter.offset))
                    key = (letter.key or b"?").decode("utf-8", "replace")
                    counts[printable(key, _MAX_KEY)] += 1
                if len(seen) >= _MAX_LETTERS:
                    break
    finally:
        await box.close()
    return counts

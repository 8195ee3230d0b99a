"""Topics as code: what stands between the topics that are declared and those that a log has. Pure: no I/O.

Settings go by Kafka's names on every backend, so that a plan can be compared with what Kafka's own tools show;
``max.message.bytes`` is the largest record and 1,024 bytes for the batch around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from dynamo_es.log.base import RECORD_OVERHEAD_BYTES, TopicConfig, TopicDescription

# Which fields of TopicConfig and TopicDescription a setting is made of.
_FIELDS = {
    "partitions": ("partitions",),
    "replication.factor": (),
    "min.insync.replicas": ("min_insync_replicas",),
    "cleanup.policy": ("compacted", "retention_ms"),
    "retention.ms": ("retention_ms",),
    "max.message.bytes": ("max_record_bytes",),
}
_UNITS_MS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"))


class Action(Enum):
    """What is to be done about a topic."""

    KEEP = "keep"
    CREATE = "create"
    ALTER = "alter"
    # Something differs that no command changes in place; what can be altered beside it still is.
    BY_HAND = "by hand"
    # The partition count differs: nothing at all is done.
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting. ``fix``: what a person must do about it; empty if it can be altered in place."""

    setting: str
    found: str
    declared: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class TopicStep:
    """What is to be done about one topic."""

    topic: TopicConfig
    action: Action
    differences: tuple[Difference, ...] = ()
    found: TopicDescription | None = None

    @property
    def alteration(self) -> TopicConfig | None:
        """What to give to ``EventLog.alter_topic``: as declared, but for what cannot be altered. None: nothing."""
        if self.found is None or all(difference.fix for difference in self.differences):
            return None
        kept: dict[str, Any] = {"replication": None}
        for difference in self.differences:
            if difference.fix:
                for field in _FIELDS[difference.setting]:
                    kept[field] = getattr(self.found, field)
        return replace(self.topic, **kept)


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """One step for each declared topic, in their order."""

    steps: tuple[TopicStep, ...]

    def of(self, *actions: Action) -> list[TopicStep]:
        """The steps of these kinds."""
        return [step for step in self.steps if step.action in actions]

    @property
    def in_force(self) -> bool:
        """Is everything as declared?"""
        return all(step.action is Action.KEEP for step in self.steps)

    @property
    def refusal(self) -> str:
        """Why nothing may be done: every wrong partition count, with topic, counts and fix. Empty if there is none."""
        return "; ".join(
            f"{step.topic.name}: {difference.found} partitions, declared {difference.declared}: {difference.fix}"
            for step in self.of(Action.REFUSE)
            for difference in step.differences
            if difference.setting == "partitions"
        )


def plan_topics(
    declared: Sequence[TopicConfig],
    found: Mapping[str, TopicDescription],
    alterable: frozenset[str],
    numbered_as: Mapping[str, str],
) -> TopicPlan:
    """Compare.

    Args:
        declared: Topics as they shall be. None in ``replication`` or ``min_insync_replicas`` means any.
        found: The log's topics by name; others than the declared ones are left alone.
        alterable: As ``EventLog.alterable``.
        numbered_as: Topic by the one whose partition numbers its records use: the counts of both must agree.
    """
    counts = {topic.name: topic.partitions for topic in declared}
    counts.update({name: description.partitions for name, description in found.items()})
    steps = []
    for topic in declared:
        there = found.get(topic.name)
        if there is None:
            steps.append(TopicStep(topic, Action.CREATE, _settings(topic)))
            continue
        leader = numbered_as.get(topic.name)
        partner = f"{leader}, which has {counts[leader]}" if leader in counts else ""
        differences = (*_partitions(topic, there, partner), *_replicas(topic, there), *_kept(topic, there, alterable))
        steps.append(TopicStep(topic, _action(differences), differences, there))
    return TopicPlan(tuple(steps))


def _action(differences: Sequence[Difference]) -> Action:
    if not differences:
        return Action.KEEP
    if any(difference.setting == "partitions" for difference in differences):
        return Action.REFUSE
    return Action.BY_HAND if any(difference.fix for difference in differences) else Action.ALTER


def _settings(topic: TopicConfig) -> tuple[Difference, ...]:
    """All that a new topic is told."""
    told = [
        ("partitions", str(topic.partitions)),
        ("replication.factor", None if topic.replication is None else str(topic.replication)),
        ("min.insync.replicas", None if topic.min_insync_replicas is None else str(topic.min_insync_replicas)),
        ("cleanup.policy", _cleanup(topic.compacted)),
        ("retention.ms", None if topic.compacted else _age(topic.retention_ms)),
        ("max.message.bytes", str(topic.max_record_bytes + RECORD_OVERHEAD_BYTES)),
    ]
    return tuple(Difference(name, "", value) for name, value in told if value is not None)


def _partitions(topic: TopicConfig, there: TopicDescription, partner: str) -> list[Difference]:
    if topic.partitions == there.partitions:
        return []
    why = "a key's partition hangs on the count, and the order of its records on the partition"
    if partner:
        why += f" (and its records are numbered by the partitions of {partner})"
    fix = (
        f"{why}, so the count never changes in place; use another --topic-namespace, or, if its records may go, stop "
        "the fleet, delete the topic and run dynamo-es topics apply"
    )
    return [Difference("partitions", str(there.partitions), str(topic.partitions), fix)]


def _replicas(topic: TopicConfig, there: TopicDescription) -> list[Difference]:
    differences = []
    if there.replication is not None and topic.replication not in (None, there.replication):
        fix = "replicas are moved by the cluster's administrator: kafka-reassign-partitions"
        differences.append(Difference("replication.factor", str(there.replication), str(topic.replication), fix))
    found = there.min_insync_replicas
    if found is not None and there.replication is not None:
        declared = found if topic.min_insync_replicas is None else topic.min_insync_replicas
        fix = f"there are only {there.replication} replicas, and every append fails; add replicas, or ask for fewer"
        if declared > there.replication:
            differences.append(Difference("min.insync.replicas", str(found), str(declared), fix))
        elif declared != found:
            differences.append(Difference("min.insync.replicas", str(found), str(declared)))
    return differences


def _kept(topic: TopicConfig, there: TopicDescription, alterable: frozenset[str]) -> list[Difference]:
    found_cleanup = _cleanup(there.compacted)
    if there.compacted and there.retention_ms is not None:
        found_cleanup = "compact,delete"
    wanted_cleanup = _cleanup(topic.compacted)
    pairs = [("compacted", "cleanup.policy", found_cleanup, wanted_cleanup)]
    if not topic.compacted:
        pairs.append(("retention_ms", "retention.ms", _age(there.retention_ms), _age(topic.retention_ms)))
    if there.max_record_bytes is not None:
        found, wanted = (size + RECORD_OVERHEAD_BYTES for size in (there.max_record_bytes, topic.max_record_bytes))
        pairs.append(("max_record_bytes", "max.message.bytes", str(found), str(wanted)))
    fix = "this log cannot change it in place; delete the topic, if its records may go, and run dynamo-es topics apply"
    return [
        Difference(setting, was, wanted, "" if field in alterable else fix)
        for field, setting, was, wanted in pairs
        if was != wanted
    ]


def _cleanup(compacted: bool) -> str:
    return "compact" if compacted else "delete"


def _age(retention_ms: int | None) -> str:
    """Kafka's number, with words that can be read: ``604800000 (7 d)``."""
    if retention_ms is None:
        return "-1 (for ever)"
    for unit_ms, unit in _UNITS_MS:
        if retention_ms >= unit_ms and retention_ms % unit_ms == 0:
            return f"{retention_ms} ({retention_ms // unit_ms} {unit})"
    return str(retention_ms)

"""``dynamo-es topics``: declare, create, list and read topics on any log."""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo_es.cli.process import run_on_log
from dynamo_es.config.command_options import ReadConfig, ToolLoggingConfig
from dynamo_es.config.options import add_flags, load
from dynamo_es.config.tree import LogConfig
from dynamo_es.errors import ConfigError
from dynamo_es.log.base import Bounds, EventLog, Record, TopicPartition
from dynamo_es.log.errors import LogError
from dynamo_es.log.topic_plan import Action, TopicPlan, plan_topics
from dynamo_es.runtime.declared_topics import declared_topics, numbered_alike
from schemas.catalog import TOPICS, topic_spec
from schemas.codec import SchemaError, TopicCodec
from schemas.topic import TopicSpec

_POLL = 1000
_MARKS = {
    Action.KEEP: "= as declared",
    Action.CREATE: "+ create",
    Action.ALTER: "~ change",
    Action.BY_HAND: "! by hand",
    Action.REFUSE: "! refused",
}


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("topics", help="declare, create, list and read the topics of a log")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, text, run in (
        ("plan", "show what apply would create and change", _run_plan),
        ("apply", "create what is missing, and change what is not as declared and may be changed", _run_apply),
        ("check", "exit code 1 unless every topic is as declared", _run_check),
        ("create", "create the topics that are missing, and the log if need be", _run_create),
        ("list", "list the topics with their partitions and offsets", _run_list),
        ("read", "print the records of a topic as JSON lines", _run_read),
    ):
        sub = actions.add_parser(name, help=text)
        add_flags(sub, LogConfig)
        add_flags(sub, ToolLoggingConfig)
        if run is _run_read:
            names = ", ".join(spec.name for spec in TOPICS)
            sub.add_argument("topic", help=f"one of {names}")
            add_flags(sub, ReadConfig)
            sub.add_argument("--follow", action="store_true", help="go on with records as they come")
        sub.set_defaults(run=run)


def _run_create(flags: argparse.Namespace) -> int:
    return run_on_log(flags, _create, may_make=True)


def _run_plan(flags: argparse.Namespace) -> int:
    return run_on_log(flags, _plan)


def _run_apply(flags: argparse.Namespace) -> int:
    return run_on_log(flags, _apply, may_make=True)


def _run_check(flags: argparse.Namespace) -> int:
    return run_on_log(flags, _check)


def _run_list(flags: argparse.Namespace) -> int:
    return run_on_log(flags, _list)


def _run_read(flags: argparse.Namespace) -> int:
    config = load(ReadConfig, flags, os.environ)
    if config.offset is not None and config.partition is None:
        raise ConfigError("--offset needs --partition: each partition counts its own")
    try:
        spec = topic_spec(flags.topic)
    except KeyError as error:
        raise ConfigError(error.args[0]) from error
    return run_on_log(flags, lambda log, log_config: _read(log, log_config, spec, config, flags.follow))


async def _create(log: EventLog, config: LogConfig) -> int:
    await log.create_topics(declared_topics(config))
    return await _list(log, config)


async def _plan(log: EventLog, config: LogConfig) -> int:
    _show(await compare(log, config))
    return 0


async def _check(log: EventLog, config: LogConfig) -> int:
    plan = await compare(log, config)
    _show(plan)
    return 0 if plan.in_force else 1


async def _apply(log: EventLog, config: LogConfig) -> int:
    plan = await compare(log, config)
    _show(plan)
    if plan.refusal:
        raise LogError(f"nothing was changed: {plan.refusal}")
    await log.create_topics([step.topic for step in plan.of(Action.CREATE)])
    for step in plan.of(Action.ALTER, Action.BY_HAND):
        if step.alteration is not None:
            await log.alter_topic(step.alteration)
    after = await compare(log, config)
    if after.in_force:
        print("all topics are as declared")
        return 0
    print("left to do by hand:")
    _show(TopicPlan(tuple(step for step in after.steps if step.action is not Action.KEEP)))
    return 1


async def compare(log: EventLog, config: LogConfig) -> TopicPlan:
    """The topics that the configuration declares against those that the log has. Raises ``LogError``."""
    declared = declared_topics(config)
    there = set(await log.list_topics())
    found = {topic.name: await log.describe(topic.name) for topic in declared if topic.name in there}
    return plan_topics(declared, found, log.alterable, numbered_alike(config.namespace))


def _show(plan: TopicPlan) -> None:
    for step in plan.steps:
        print(f"{_MARKS[step.action]:14} {step.topic.name}")
        if step.action is Action.CREATE:
            print(f"{'':17}{', '.join(f'{setting.setting} {setting.declared}' for setting in step.differences)}")
            continue
        for difference in step.differences:
            fix = f": {difference.fix}" if difference.fix else ""
            print(f"{'':17}{difference.setting} {difference.found} -> {difference.declared}{fix}")


async def _list(log: EventLog, config: LogConfig) -> int:
    existing = set(await log.list_topics())
    print(f"{'TOPIC':28} {'PARTITIONS':>10} {'RECORDS':>10}  CLEANUP     OFFSETS")
    for spec in TOPICS:
        name = spec.qualified(config.namespace)
        if name not in existing:
            print(f"{name:28} {'missing':>10}")
            continue
        bounds = await log.bounds(name)
        records = sum(limits.end - limits.start for limits in bounds.values())
        offsets = " ".join(f"{number}:{limits.start}-{limits.end}" for number, limits in sorted(bounds.items()))
        print(f"{name:28} {len(bounds):>10} {records:>10}  {spec.cleanup.value:10}  {offsets}")
    return 0


async def _read(log: EventLog, log_config: LogConfig, spec: TopicSpec, config: ReadConfig, follow: bool) -> int:
    name = spec.qualified(log_config.namespace)
    bounds = await log.bounds(name)
    positions = {TopicPartition(name, number): offset for number, offset in _starts(name, bounds, config).items()}
    ends = {position: bounds[position.partition].end for position in positions}
    codec = TopicCodec(spec)
    reader = log.reader(positions)
    left = config.max_records
    try:
        while left != 0 and (follow or any(reader.positions()[place] < end for place, end in ends.items())):
            for records in (await reader.poll(timeout_s=1.0, max_records=min(left or _POLL, _POLL))).values():
                for record in records:
                    print(_line(spec, codec, record), flush=follow)
                    left = None if left is None else left - 1
    finally:
        await reader.close()
    return 0


def _starts(name: str, bounds: Mapping[int, Bounds], config: ReadConfig) -> dict[int, int]:
    """Where to begin, by partition. Raises ``ConfigError`` if the topic has no such partition or offset."""
    if config.partition is None:
        return {number: limits.start for number, limits in sorted(bounds.items())}
    if config.partition not in bounds:
        raise ConfigError(f"--partition {config.partition}: {name} has partitions 0 to {len(bounds) - 1}")
    limits = bounds[config.partition]
    offset = limits.start if config.offset is None else config.offset
    if not limits.start <= offset <= limits.end:
        raise ConfigError(f"--offset {offset}: {name}[{config.partition}] has offsets {limits.start} to {limits.end}")
    return {config.partition: offset}


def _line(spec: TopicSpec, codec: TopicCodec, record: Record) -> str:
    shown: dict[str, Any] = {
        "partition": record.partition,
        "offset": record.offset,
        "time": datetime.datetime.fromtimestamp(record.timestamp_ms / 1000, datetime.UTC).isoformat(),
        "key": record.key.decode("utf-8", "replace") if record.key is not None else None,
    }
    if record.value is None:
        shown["deleted"] = True
    else:
        try:
            shown |= readable(codec.decode(record.value, record.headers))
        except SchemaError as error:
            shown["refused"] = str(error)
    return msgspec.json.encode(shown).decode()


def readable(value: msgspec.Struct) -> dict[str, Any]:
    """A Struct as a JSON-able dict; packed columns become their length."""
    tag = value.__struct_config__.tag
    shown: dict[str, Any] = {"type": tag} if tag is not None else {}
    for name in value.__struct_fields__:
        item = getattr(value, name)
        shown[name] = item.hex() if name == "session" else _readable_field(item)
    return shown


def _readable_field(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return readable(value)
    if isinstance(value, bytes):
        return f"{len(value) // 8} hashes" if len(value) % 8 == 0 else f"{len(value)} bytes"
    if isinstance(value, list):
        return [_readable_field(item) for item in value]
    return value

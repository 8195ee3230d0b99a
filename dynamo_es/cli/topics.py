"""``dynamo-es topics``: create, list and read topics on any log."""

from __future__ import annotations

import argparse
import datetime
import os
from typing import Any

import msgspec

from dynamo_es.cli.process import run_async, set_up_logging, with_log
from dynamo_es.config.options import add_flags, load
from dynamo_es.config.tree import LogConfig, LoggingConfig
from dynamo_es.errors import ConfigError
from dynamo_es.log.base import EventLog, Record, TopicPartition
from dynamo_es.runtime.appender import topic_configs
from schemas.catalog import TOPICS, topic_spec
from schemas.codec import SchemaError, TopicCodec
from schemas.topic import TopicSpec


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("topics", help="create, list and read the topics of a log")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, text, action in (
        ("create", "create the topics that are missing", _create),
        ("list", "list the topics with their partitions and offsets", _list),
        ("read", "print the records of a topic as JSON lines", _read),
    ):
        sub = actions.add_parser(name, help=text)
        add_flags(sub, LogConfig)
        add_flags(sub, LoggingConfig)
        if action is _read:
            names = ", ".join(spec.name for spec in TOPICS)
            sub.add_argument("topic", help=f"one of {names}")
            sub.add_argument("--partition", type=int, default=None, help="only this partition")
            sub.add_argument("--offset", type=int, default=None, help="from this offset on; default: the start")
            sub.add_argument("--max-records", type=int, default=None, help="stop after so many records")
            sub.add_argument("--follow", action="store_true", help="go on with records as they come")
        sub.set_defaults(run=_runner(action))


def _runner(action: Any) -> Any:
    def run(flags: argparse.Namespace) -> int:
        config = load(LogConfig, flags, os.environ)
        set_up_logging(load(LoggingConfig, flags, os.environ))
        run_async(with_log(config, lambda log: action(log, config, flags)))
        return 0

    return run


async def _create(log: EventLog, config: LogConfig, flags: argparse.Namespace) -> None:
    await log.create_topics(topic_configs(config.namespace, config.replication))
    await _list(log, config, flags)


async def _list(log: EventLog, config: LogConfig, flags: argparse.Namespace) -> None:
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


async def _read(log: EventLog, config: LogConfig, flags: argparse.Namespace) -> None:
    try:
        spec = topic_spec(flags.topic)
    except KeyError as error:
        raise ConfigError(error.args[0]) from error
    name = spec.qualified(config.namespace)
    bounds = await log.bounds(name)
    wanted = [flags.partition] if flags.partition is not None else sorted(bounds)
    if any(number not in bounds for number in wanted):
        raise ConfigError(f"--partition {flags.partition}: {name} has partitions 0 to {len(bounds) - 1}")
    positions = {
        TopicPartition(name, number): bounds[number].start if flags.offset is None else flags.offset
        for number in wanted
    }
    ends = {TopicPartition(name, number): bounds[number].end for number in wanted}
    codec = TopicCodec(spec)
    reader = log.reader(positions)
    left = flags.max_records if flags.max_records is not None else -1
    try:
        while left and (flags.follow or any(reader.positions()[place] < end for place, end in ends.items())):
            for records in (await reader.poll(timeout_s=1.0, max_records=left if left > 0 else 1000)).values():
                for record in records:
                    print(_line(spec, codec, record), flush=flags.follow)
                    left -= 1
    finally:
        await reader.close()


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
        shown[name] = _readable_field(getattr(value, name))
    return shown


def _readable_field(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return readable(value)
    if isinstance(value, bytes):
        return f"{len(value) // 8} hashes" if len(value) % 8 == 0 else f"{len(value)} bytes"
    if isinstance(value, list):
        return [_readable_field(item) for item in value]
    return value

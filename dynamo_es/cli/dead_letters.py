"""``dynamo-es dead-letters``: the records that readers refused; why, what is in them, and back with them."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import os
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from dynamo_es.cli.process import run_on_log
from dynamo_es.cli.topics import readable
from dynamo_es.clock import SystemClock
from dynamo_es.config.command_options import LettersConfig, ToolLoggingConfig
from dynamo_es.config.options import add_flags, load
from dynamo_es.config.points_in_time import parse_since
from dynamo_es.config.tree import LogConfig
from dynamo_es.errors import ConfigError, InvalidArgument
from dynamo_es.log.base import EventLog
from dynamo_es.log.errors import RecordTooLarge, UnknownTopic
from dynamo_es.runtime.letter_box import FoundLetter, LetterBox, LetterFilter
from dynamo_es.runtime.letters import CannotRetry, excerpt, printable, retry_entry, value_as_far_as_known
from schemas.codec import SchemaError
from schemas.dead_letters import DeadLetter

_LISTED = 50
_SHOWN_TEXT = 160
_SHOWN_BYTES = 256


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("dead-letters", help="list, show and retry the records that readers refused")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, text, run in (
        ("list", "list them, the newest last, with their numbers", _run_list),
        ("show", "print one of them, with what its bytes mean", _run_show),
        ("retry", "append the original records again, if they decode now; exit code 1 if one did not go", _run_retry),
    ):
        sub = actions.add_parser(name, help=text)
        add_flags(sub, LogConfig)
        add_flags(sub, ToolLoggingConfig)
        if run is _run_show:
            sub.add_argument("letter", help="its number in the list")
        else:
            add_flags(sub, LettersConfig)
        if run is _run_retry:
            sub.add_argument("letters", nargs="*", metavar="letter", help="their numbers in the list")
            sub.add_argument("--all", action="store_true", help="all that the filters let through, each record once")
            sub.add_argument("--dry-run", action="store_true", help="only say what would be done")
        sub.set_defaults(run=run)


def _run_list(flags: argparse.Namespace) -> int:
    wanted, most = _filter(flags)
    return run_on_log(flags, lambda log, config: _list(log, config, wanted, most or _LISTED))


def _run_show(flags: argparse.Namespace) -> int:
    number = _number(flags.letter)
    return run_on_log(flags, lambda log, config: _show(log, config, number))


def _run_retry(flags: argparse.Namespace) -> int:
    wanted, most = _filter(flags)
    numbers = [_number(text) for text in flags.letters]
    if bool(numbers) == flags.all:
        raise ConfigError("dead-letters retry needs the numbers of letters (see dead-letters list), or --all")
    if numbers and (wanted != LetterFilter() or most is not None):
        raise ConfigError("filters choose among all letters: give --all with them, or numbers without them")
    if numbers:
        return run_on_log(flags, lambda log, config: _retry(log, config, numbers, flags.dry_run, rejected=True))
    return run_on_log(flags, lambda log, config: _retry_all(log, config, wanted, most, flags.dry_run))


def _filter(flags: argparse.Namespace) -> tuple[LetterFilter, int | None]:
    config = load(LettersConfig, flags, os.environ)
    since_ms = None if config.since is None else parse_since(config.since, SystemClock().now_ms())
    return LetterFilter(config.topic, config.reason, since_ms), config.max_letters


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise ConfigError(f"letter {text[:40]!r}: expected its number in dynamo-es dead-letters list")
    return int(text)


@contextlib.asynccontextmanager
async def _opened(log: EventLog, config: LogConfig) -> AsyncIterator[LetterBox]:
    box = LetterBox(log, config.namespace)
    await box.open()
    try:
        yield box
    finally:
        await box.close()


async def _list(log: EventLog, config: LogConfig, wanted: LetterFilter, most: int) -> int:
    lines: list[str] = []
    more = False
    async with _opened(log, config) as box, contextlib.aclosing(box.newest(wanted)) as letters:
        async for found in letters:
            if len(lines) == most:
                more = True
                break
            lines.append(_line(found))
    print(f"{'LETTER':>8}  {'TIME':20}  {'REASON':16} {'BYTES':>9}  RECORD")
    for line in reversed(lines):
        print(line)
    if more:
        print(f"these are the newest {len(lines)}; --max-letters shows more, --since, --topic and --reason fewer")
    return 0


def _line(found: FoundLetter) -> str:
    head = f"{found.number:>8}  {_time(found.timestamp_ms):20}  "
    letter = found.letter
    if isinstance(letter, SchemaError):
        return f"{head}{'-':16} {found.size:>9}  this is no dead letter: {printable(str(letter), _SHOWN_TEXT)}"
    text = f"{_place(letter)} by {letter.reader}: {letter.detail}"
    return f"{head}{printable(letter.reason, 16):16} {letter.value_bytes:>9}  {printable(text, _SHOWN_TEXT)}"


async def _show(log: EventLog, config: LogConfig, number: int) -> int:
    async with _opened(log, config) as box, contextlib.aclosing(box.numbered([number])) as letters:
        async for found in letters:
            if isinstance(found.letter, SchemaError):
                raise InvalidArgument(f"record {number} of the dead letters is none: {found.letter}")
            shown = _described(found, found.letter, config.namespace)
            print(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode())
    return 0


def _described(found: FoundLetter, letter: DeadLetter, namespace: str) -> dict[str, Any]:
    value = letter.value
    shown: dict[str, Any] = {
        "letter": found.number,
        "time": _time(found.timestamp_ms),
        "reason": letter.reason,
        "detail": letter.detail,
        "reader": letter.reader,
        "topic": letter.topic,
        "partition": letter.partition,
        "offset": letter.offset,
        "record_time": _time(letter.timestamp_ms),
        "key": None if letter.key is None else letter.key.decode("utf-8", "replace"),
        "value_bytes": letter.value_bytes,
        "kept_bytes": None if value is None else len(value),
    }
    if value is not None:
        known = value_as_far_as_known(letter, namespace)
        shown["value"] = readable(known) if isinstance(known, msgspec.Struct) else known
    shown = {name: excerpt(item) for name, item in shown.items()}
    if value is not None:
        shown["bytes"] = value[:_SHOWN_BYTES].hex(" ", 4) + (" …" if len(value) > _SHOWN_BYTES else "")
    try:
        retry_entry(letter, namespace)
        shown["retry"] = f"it decodes now: dynamo-es dead-letters retry {found.number}"
    except CannotRetry as error:
        shown["retry"] = f"not possible: {printable(str(error), 2 * _SHOWN_TEXT)}"
    return shown


async def _retry_all(log: EventLog, config: LogConfig, wanted: LetterFilter, most: int | None, dry_run: bool) -> int:
    numbers: list[int] = []
    async with _opened(log, config) as box, contextlib.aclosing(box.newest(wanted)) as letters:
        async for found in letters:
            if len(numbers) == most:
                break
            numbers.append(found.number)
    # A fold refused these although they decode; it would again, and each time a new letter would come of it.
    return await _retry(log, config, numbers, dry_run, rejected=wanted.reason == "rejected")


async def _retry(log: EventLog, config: LogConfig, numbers: list[int], dry_run: bool, *, rejected: bool) -> int:
    """Append the originals in the order of the letters. ``rejected``: also what was refused although it decodes."""
    seen: set[bytes] = set()
    gone = stayed = 0
    async with _opened(log, config) as box, contextlib.aclosing(box.numbered(numbers)) as letters:
        async for found in letters:
            try:
                said = await _retry_one(log, config, found, seen, dry_run, rejected)
                gone += said is not None
                said = said or "the same record as before, once is enough"
            except (SchemaError, CannotRetry, UnknownTopic, RecordTooLarge, InvalidArgument) as error:
                stayed += 1
                said = f"not appended: {printable(str(error), 2 * _SHOWN_TEXT)}"
            place = "" if isinstance(found.letter, SchemaError) else printable(_place(found.letter), _SHOWN_TEXT)
            print(f"{found.number:>8}  {place}: {said}")
    print(f"{gone} {'would be appended' if dry_run else 'appended'}, {stayed} not")
    return 1 if stayed else 0


async def _retry_one(
    log: EventLog, config: LogConfig, found: FoundLetter, seen: set[bytes], dry_run: bool, rejected: bool
) -> str | None:
    """What was done; None for a record that was seen before (each reader writes a letter of its own)."""
    letter = found.letter
    if isinstance(letter, SchemaError):
        raise letter
    entry = retry_entry(letter, config.namespace)
    if letter.reason == "rejected" and not rejected:
        raise CannotRetry("it always decoded, and its reader refused it all the same; --reason rejected retries it")
    content = hashlib.blake2b(repr((letter.topic, letter.partition, entry.key, entry.value)).encode(), digest_size=16)
    if content.digest() in seen:
        return None
    seen.add(content.digest())
    what = "it is a deletion" if entry.value is None else "it decodes now"
    if dry_run:
        return f"{what}, and would be appended"
    position = await log.append(letter.topic, entry)
    return f"{what}, appended as {position.topic}[{position.partition}]@{position.offset}"


def _place(letter: DeadLetter) -> str:
    return letter.topic if letter.partition < 0 else f"{letter.topic}[{letter.partition}]@{letter.offset}"


def _time(timestamp_ms: int) -> str:
    try:
        return datetime.datetime.fromtimestamp(timestamp_ms / 1000, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, ValueError, OSError):
        return str(timestamp_ms)

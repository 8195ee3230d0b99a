"""Processes that the crash tests kill. They print one line after each acknowledgement.

python -m tests.integration.log_crash_child write URL TOPIC RUN
python -m tests.integration.log_crash_child maintain URL TOPIC RUN
python -m tests.integration.log_crash_child fill URL
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import zlib
from pathlib import Path

from dynamo_es.clock import SystemClock
from dynamo_es.log.base import Entry, EventLog, TopicConfig, TopicPartition
from dynamo_es.log.errors import LogFull
from dynamo_es.log.open import open_log


def content(run: int, number: int) -> bytes:
    """A value that says who wrote it and shows if any of its bytes are wrong."""
    body = b"%d:%d:" % (run, number) + random.Random(run << 32 | number).randbytes(40 + number % 700)
    return zlib.crc32(body).to_bytes(4, "big") + body


def parse(value: bytes) -> tuple[int, int]:
    """Run and number of a value; raises AssertionError if it is torn."""
    assert zlib.crc32(value[4:]).to_bytes(4, "big") == value[:4], "torn"
    run, number, _ = value[4:].split(b":", 2)
    assert content(int(run), int(number)) == value
    return int(run), int(number)


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def write(log: EventLog, topic: str, run: int) -> None:
    """Batches of 1, 4 and 32 to two partitions, for ever."""
    numbers = itertools.count()
    for size in itertools.cycle((1, 4, 32, 1)):
        batch = [next(numbers) for _ in range(size)]
        entries = [Entry(content(run, number), partition=number % 2) for number in batch]
        positions = await log.append_all(topic, entries)
        say(*(f"{p.partition}/{p.offset}/{number}" for p, number in zip(positions, batch, strict=True)))


async def maintain(log: EventLog, topic: str, run: int) -> None:
    """Appends to a trimmed and to a compacted topic, and trims and compacts, for ever."""
    trimmed = TopicPartition(topic, 0)
    rng = random.Random(run)
    for number in itertools.count():
        keys = [rng.randrange(8) for _ in range(4)]
        entries = [
            Entry(
                None if rng.random() < 0.3 else content(run, number),
                b"k%d" % key,
                (("at", b"%d/%d" % (run, number * 4 + index)),),
            )
            for index, key in enumerate(keys)
        ]
        await log.append_all(f"{topic}.compacted", entries)
        (position,) = await log.append_all(topic, [Entry(content(run, number))])
        say(position.offset, number, *keys)
        if number % 10 == 9:
            start = await log.trim(trimmed, position.offset - 20)
            say("trimmed", start)
            # Two days on: everything is old enough to be sealed, and deletions to be dropped.
            await log.enforce_retention(SystemClock().now_ms() + 2 * 86_400_000)


async def fill(log: EventLog, folder: Path) -> None:
    """Append until the disk is full, read, make room, append."""
    ballast = folder.parent / "ballast"
    ballast.write_bytes(b"x" * 1_500_000)
    await log.create_topics([TopicConfig("t", 1)])
    position = TopicPartition("t", 0)
    early = log.reader({position: 0})
    acknowledged = 0
    errors: list[str] = []
    while len(errors) < 5:
        try:
            await log.append("t", Entry(content(0, acknowledged) + b"x" * 4000))
            acknowledged += 1
        except LogFull as error:
            errors.append(str(error))
    late = open_log(log.url, SystemClock())
    await late.start()
    read = [await count(reader, position) for reader in (early, late.reader({position: 0}))]
    full_end = (await log.bounds("t"))[0].end
    ballast.unlink()
    again = (await log.append("t", Entry(b"after"))).offset
    other = (await late.append("t", Entry(b"after"))).offset
    say(
        json.dumps(
            {
                "acknowledged": acknowledged,
                "errors": errors,
                "read": read,
                "full_end": full_end,
                "again": [again, other],
                "in_all": await count(log.reader({position: 0}), position),
            }
        )
    )
    await late.close()


async def count(reader, position: TopicPartition) -> int:
    total = 0
    while batch := await reader.poll(timeout_s=0):
        for record in batch[position]:
            assert record.offset == total
            total += 1
    return total


async def main() -> None:
    verb, url, *rest = sys.argv[1:]
    log = open_log(url, SystemClock())
    await log.start()
    if verb == "fill":
        await fill(log, Path(url.removeprefix("embedded://").partition("?")[0]))
    elif verb == "write":
        await write(log, rest[0], int(rest[1]))
    elif verb == "maintain":
        await maintain(log, rest[0], int(rest[1]))
    await log.close()


if __name__ == "__main__":
    asyncio.run(main())

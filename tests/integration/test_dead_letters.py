"""``dynamo-es dead-letters`` on an embedded log: letters that folds and publishers wrote, listed, shown and retried."""

from __future__ import annotations

import asyncio
import datetime
import json
import random

import pytest

from dynamo_es.cli.main import main
from dynamo_es.clock import ManualClock, SystemClock
from dynamo_es.log.base import Entry, TopicPartition
from dynamo_es.log.open import open_log
from dynamo_es.runtime.appender import topic_configs
from dynamo_es.runtime.letters import CannotRetry, retry_entry
from schemas.codec import TopicCodec
from schemas.columns import pack_u64
from schemas.dead_letters import DEAD_LETTERS, MAX_KEPT_BYTES, DeadLetter, key_dead_letter
from schemas.kv_events import KV_EVENTS, BlocksStored, KvEvents, key_kv_events
from schemas.registry import REGISTRY
from schemas.requests import REQUESTS, Finished
from streams.kv_index import KvIndexFold
from tests.support.letters import folding

NS = "dynamo"
TOPICS = (KV_EVENTS, REGISTRY, REQUESTS, DEAD_LETTERS)
KEY = key_kv_events("m", 1, 0)


def batch(seq, *blocks):
    column = pack_u64(blocks)
    value = KvEvents(1, "m", 1, 0, 5, seq, 4, seq == 0, [BlocksStored("device", None, column, column)])
    return TopicCodec(KV_EVENTS).encode(value)


def letter(**changes):
    fields = {
        "version": 1, "topic": "dynamo.kv-events", "partition": 0, "offset": 0, "timestamp_ms": 1_750_000_000_000,
        "reason": "undecodable", "detail": "why", "reader": "kv-index", "key": KEY, "value": batch(0, 1),
    }  # fmt: skip
    fields |= changes
    fields.setdefault("value_bytes", len(fields["value"] or b""))
    return DeadLetter(**fields)


class Desk:
    """An embedded log and the command line on it."""

    def __init__(self, folder, capsys):
        self.url = f"embedded://{folder}/log"
        self._capsys = capsys
        self.on_log(lambda log: log.create_topics(topic_configs(NS, None, TOPICS)))

    def on_log(self, use):
        async def run():
            log = open_log(self.url, SystemClock(), rng=random.Random(1))
            await log.start()
            try:
                return await use(log)
            finally:
                await log.close()

        return asyncio.run(run())

    def put(self, *letters, clock=None):
        """Append letters; with a clock a minute apart."""

        async def use(log):
            codec = TopicCodec(DEAD_LETTERS)
            for item in letters:
                key = key_dead_letter(item.topic, item.partition, item.offset)
                stamp = None
                if clock is not None:
                    stamp = clock.now_ms()
                    clock.advance(60)
                await log.append(DEAD_LETTERS.qualified(NS), Entry(codec.encode(item), key, codec.headers, stamp))

        self.on_log(use)

    def records(self, spec):
        async def use(log):
            topic = spec.qualified(NS)
            bounds = await log.bounds(topic)
            reader = log.reader({TopicPartition(topic, number): limits.start for number, limits in bounds.items()})
            records = []
            while sum(reader.positions().values()) < sum(limits.end for limits in bounds.values()):
                for part in (await reader.poll(timeout_s=5)).values():
                    records += part
            await reader.close()
            return records

        return self.on_log(use)

    def run(self, *words):
        code = main(["dead-letters", *words, "--log", self.url])
        printed = self._capsys.readouterr()
        return code, printed.out, printed.err


@pytest.fixture
def desk(tmp_path, capsys):
    return Desk(tmp_path, capsys)


def test_what_a_fold_refuses_is_listed_shown_and_retried(desk):
    """A publisher of a newer version wrote records that this version refused; after the upgrade they go back."""
    good = batch(1, 12)

    async def refuse(log):
        topic = KV_EVENTS.qualified(NS)
        codec = TopicCodec(KV_EVENTS)
        async with folding(log, NS, KvIndexFold()) as (runner,):
            await log.append(topic, Entry(batch(0, 11), KEY, codec.headers))
            await log.append(topic, Entry(good, KEY, (("schema", b"kv-events/2"),)))
            await log.append(topic, Entry(b"\xc1 not msgpack", KEY, codec.headers))
            await runner.wait_caught_up(10)
            assert sum(runner.state.models["m"].tier_blocks) == 1

    desk.on_log(refuse)
    code, out, _ = desk.run("list")
    assert code == 0
    lines = out.splitlines()
    assert len(lines) == 3
    assert lines[1].split()[:1] == ["0"]
    assert "unknown_version" in lines[1]
    assert "@1 by kv-index: header says 'kv-events/2'" in lines[1]
    assert "undecodable" in lines[2]

    shown = json.loads(desk.run("show", "0")[1])
    assert shown["key"] == KEY.decode()
    assert shown["value"]["type"] == "kv-events"
    assert shown["value"]["seq"] == 1
    assert shown["value"]["events"][0]["type"] == "stored"
    assert shown["retry"] == "it decodes now: dynamo-es dead-letters retry 0"
    broken = json.loads(desk.run("show", "1")[1])
    assert broken["bytes"].startswith("c1")
    assert broken["retry"].startswith("not possible: it does not decode: undecodable")

    before = len(desk.records(KV_EVENTS))
    code, out, _ = desk.run("retry", "--all", "--dry-run")
    assert code == 1
    assert "it decodes now, and would be appended" in out
    assert out.endswith("1 would be appended, 1 not\n")
    assert len(desk.records(KV_EVENTS)) == before

    code, out, _ = desk.run("retry", "--all")
    assert code == 1
    assert "it decodes now, appended as dynamo.kv-events[" in out
    assert "not appended: it does not decode: undecodable" in out
    assert out.endswith("1 appended, 1 not\n")
    again = desk.records(KV_EVENTS)[-1]
    original = next(record for record in desk.records(KV_EVENTS) if record.offset == 1)
    assert (again.value, again.key, again.partition) == (good, KEY, original.partition)
    assert again.timestamp_ms == original.timestamp_ms
    assert again.headers == TopicCodec(KV_EVENTS).headers

    async def fold(log):
        async with folding(log, NS, KvIndexFold()) as (runner,):
            await runner.wait_caught_up(10)
            return sum(runner.state.models["m"].tier_blocks)

    assert desk.on_log(fold) == 2


def test_filters_and_bounds_of_the_list(desk):
    clock = ManualClock()
    letters = [
        letter(offset=number, reason="too_large" if number % 10 == 0 else "undecodable") for number in range(200)
    ]
    letters += [letter(topic="dynamo.requests", offset=7), letter(topic="zmq tcp://e:1", partition=-1, offset=3)]
    start_ms = clock.now_ms()
    desk.put(*letters, clock=clock)

    code, out, _ = desk.run("list")
    lines = out.splitlines()
    assert code == 0
    assert len(lines) == 52
    assert lines[1].split()[0] == "152"
    assert lines[50].split()[0] == "201"
    assert "zmq tcp://e:1 by kv-index" in lines[50]
    assert lines[51] == "these are the newest 50; --max-letters shows more, --since, --topic and --reason fewer"

    def numbers(*flags):
        heads = [line[:8].strip() for line in desk.run("list", *flags)[1].splitlines()]
        return [int(head) for head in heads if head.isdigit()]

    assert numbers("--max-letters", "500") == list(range(202))
    assert numbers("--max-letters", "3") == [199, 200, 201]
    assert numbers("--reason", "too_large") == list(range(0, 200, 10))
    assert numbers("--topic", "requests") == numbers("--topic", "dynamo.requests") == [200]
    assert numbers("--topic", "zmq tcp://e:1") == [201]
    since = datetime.datetime.fromtimestamp((start_ms + 195 * 60_000) / 1000, datetime.UTC).isoformat()
    assert numbers("--since", since) == list(range(195, 202))
    assert numbers("--since", since, "--max-letters", "2") == [200, 201]
    assert numbers("--topic", "registry") == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"value": b"x" * MAX_KEPT_BYTES, "value_bytes": 100_000},
            "has 100000 bytes and a letter keeps 65536: take it",
        ),
        ({"key": b"k" * MAX_KEPT_BYTES}, "its key has 65536 bytes or more"),
        ({"value": b"\x91"}, "it does not decode: undecodable"),
        ({"value": b""}, "it does not decode"),
        ({"value": None}, "no value, which means nothing on a topic that is not compacted"),
        ({"topic": "other.kv-events"}, "other.kv-events is no topic of the namespace dynamo; see --topic-namespace"),
        ({"topic": "dynamo.nope"}, "dynamo.nope is no topic of the namespace"),
        ({"topic": "zmq tcp://e:1", "partition": -1}, "came from zmq tcp://e:1 and never was on a topic"),
        ({"partition": 99}, "has partitions 0 to 7, not 99"),
        ({"reason": "rejected"}, "its reader refused it all the same; --reason rejected retries it"),
    ],
)
def test_what_cannot_be_retried_says_why(desk, changes, message):
    desk.put(letter(**changes))
    code, out, err = desk.run("retry", "--all")
    assert code == 1
    assert message in out
    assert out.endswith("0 appended, 1 not\n")
    assert err == ""
    assert desk.records(KV_EVENTS) == []


def test_a_record_that_several_readers_refused_is_appended_once(desk):
    desk.put(*(letter(reader=f"replica-{number}") for number in range(3)), letter(value=batch(1, 2), offset=1))
    code, out, _ = desk.run("retry", "--all")
    assert code == 0
    assert out.count("the same record as before, once is enough") == 2
    assert out.endswith("2 appended, 0 not\n")
    assert [record.value for record in desk.records(KV_EVENTS)] == [batch(0, 1), batch(1, 2)]


def test_some_letters_by_their_numbers(desk):
    desk.put(*(letter(offset=number, value=batch(number, 10 + number), reason="rejected") for number in range(5)))
    code, out, _ = desk.run("retry", "3", "1", "3")
    assert code == 0
    assert out.endswith("2 appended, 0 not\n")
    assert [record.value for record in desk.records(KV_EVENTS)] == [batch(1, 11), batch(3, 13)]


def test_a_deletion_goes_back_to_a_compacted_topic(desk):
    desk.put(letter(topic="dynamo.registry", key=b"lease/1", value=None, reason="rejected"))
    code, out, _ = desk.run("retry", "0")
    assert code == 0
    assert "it is a deletion, appended as dynamo.registry[0]@0" in out
    (record,) = desk.records(REGISTRY)
    assert (record.key, record.value) == (b"lease/1", None)


def test_what_is_no_dead_letter_is_told_and_hides_no_other(desk):
    desk.put(letter())
    desk.on_log(lambda log: log.append(DEAD_LETTERS.qualified(NS), Entry(b"\x00junk", b"k")))
    desk.put(letter(offset=2))
    code, out, _ = desk.run("list")
    assert code == 0
    assert len(out.splitlines()) == 4
    assert "this is no dead letter: " in out.splitlines()[2]
    code, _, err = desk.run("show", "1")
    assert code == 2
    assert "record 1 of the dead letters is none" in err
    assert desk.run("retry", "--all")[1].endswith("1 appended, 1 not\n")


def test_a_record_of_another_kind_is_shown_as_msgpack_and_bytes(desk):
    value = b"\x95\xa3odd\x02\xc4\x03abc" + b"\x81\xa1\x1b\x01" + b"\xd9\xff" + b"y" * 255
    desk.put(letter(value=value, key=b"\x1b[31mred\xff"))
    out = desk.run("show", "0")[1]
    assert "\x1b" not in out
    shown = json.loads(out)
    assert shown["value"][:3] == ["odd", 2, "3 bytes"]
    assert shown["value"][3] == {"\\x1b": 1}
    assert shown["key"] == "\\x1b[31mred\ufffd"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "x"], "letter 'x': expected its number in dynamo-es dead-letters list"),
        (["show", "0"], "no dead letter has the number 0; there is none at all"),
        (["retry"], "needs the numbers of letters (see dead-letters list), or --all"),
        (["retry", "1", "--all"], "needs the numbers of letters (see dead-letters list), or --all"),
        (["retry", "1", "--topic", "requests"], "give --all with them, or numbers without them"),
        (["retry", "-1"], "letter '-1': expected its number"),
    ],
)
def test_wrong_words(desk, words, message):
    code, _, err = desk.run(*words)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_a_number_that_is_not_there_names_those_that_are(desk):
    desk.put(letter(), letter(offset=1))
    assert "no dead letter has the number 2; they have 0 to 1" in desk.run("show", "2")[2]
    assert "no dead letter has the number 9; they have 0 to 1" in desk.run("retry", "0", "9")[2]
    assert desk.records(KV_EVENTS) == []


def test_the_retried_record_is_the_original():
    value = TopicCodec(REQUESTS).encode(Finished(1, "r", 0, 7, "ok", 1, 1, 1, ""))
    entry = retry_entry(letter(topic="a.requests", partition=2, key=b"r", value=value), "a")
    assert entry == Entry(value, b"r", TopicCodec(REQUESTS).headers, 1_750_000_000_000, 2)
    with pytest.raises(CannotRetry):
        retry_entry(letter(topic="a.requests", value=value), "b")

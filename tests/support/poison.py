"""Values that no reader of a topic can use, from a seed: the same on every machine."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from dynamo_es.log.base import Entry
from schemas.codec import TopicCodec
from schemas.topic import TopicSpec
from tests.unit.schemas.samples import SAMPLES

RANDOM_RECORDS = 1_000
TRUNCATED_RECORDS = 250
VERSIONS = (0, 2, 3, 255, 2**31, 2**63 - 1)


class Poison(NamedTuple):
    """One bad record and what it is an example of."""

    kind: str
    entry: Entry


def poison(spec: TopicSpec, seed: int, *, random_records: int = RANDOM_RECORDS, large: int = 4) -> list[Poison]:
    """Bad records for a topic, shuffled. ``large``: how many of each size close to the topic's bound."""
    rng = random.Random(f"{spec.name}/{seed}")
    found = [*_random(rng, random_records), *_truncated(rng, spec), *_wrong_versions(spec), *_large(rng, spec, large)]
    rng.shuffle(found)
    return found


def kinds(found: list[Poison]) -> Counter[str]:
    """How many of each kind."""
    return Counter(item.kind for item in found)


def _samples(spec: TopicSpec) -> list[bytes]:
    codec = TopicCodec(spec)
    return [codec.encode(value) for topic, value in SAMPLES if topic is spec]


def _key(rng: random.Random) -> bytes | None:
    return rng.choice((None, b"", b"k", rng.randbytes(rng.randrange(1, 40)), b"m/1:0"))


def _random(rng: random.Random, count: int) -> Iterator[Poison]:
    for _ in range(count):
        value = rng.randbytes(rng.randrange(0, 400))
        yield Poison("random bytes", Entry(value, _key(rng)))


def _truncated(rng: random.Random, spec: TopicSpec) -> Iterator[Poison]:
    headers = TopicCodec(spec).headers
    whole = _samples(spec)
    for _ in range(TRUNCATED_RECORDS):
        value = rng.choice(whole)
        yield Poison("truncated", Entry(value[: rng.randrange(0, len(value))], _key(rng), headers))


def _wrong_versions(spec: TopicSpec) -> Iterator[Poison]:
    encoder = msgspec.msgpack.Encoder()
    for topic, value in SAMPLES:
        if topic is not spec:
            continue
        for version in VERSIONS:
            if version != spec.version:
                changed = msgspec.structs.replace(value, version=version)
                yield Poison("wrong version", Entry(encoder.encode(changed), b"k"))
        for header in (b"", b"\xff\xfe", f"{spec.name}/{spec.version + 1}".encode(), b"another/1"):
            yield Poison("wrong header", Entry(encoder.encode(value), b"k", (("schema", header),)))


def _large(rng: random.Random, spec: TopicSpec, count: int) -> Iterator[Poison]:
    bound = spec.max_value_bytes
    for size in (bound - 1, bound, bound + 1, bound + 48_000):
        for _ in range(count):
            yield Poison("close to the bound", Entry(rng.randbytes(size), b"k"))

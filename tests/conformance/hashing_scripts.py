"""Random calls of the hash functions: valid ones, and ones with wrong arguments of every kind."""

from __future__ import annotations

from copy import deepcopy
from random import Random
from typing import Any

_NAMES = (None, "", "a", "b", " ", "\0", "é", "日本", "x" * 300, "a|b", {"$text": "a"})
_WRONG_NAMES = (1, 1.5, True, [], {"$bytes": "61"})
_WRONG_VALUES = (None, True, 1.5, {"$float": "nan"}, "x", "", -1, 2**32, 2**64 - 1, 2**64, [], {}, [1],
                 {"$bytes": "01"}, {"$index": 3}, {"$index": "x"}, {"$index": -1}, {"$tuple": [1, 2]},
                 {"$set": [1]})  # fmt: skip
_PARAMETERS = 6
_WRAPPERS = ("$tuple", "$deque", "$items", "$iterable", "$iterator", "$set", "$frozenset", "$keys")


def make_script(random: Random) -> dict[str, Any]:
    """One call."""
    if random.random() < 0.1:
        name = random.choice((*_NAMES, *_WRONG_NAMES, "".join(chr(random.randrange(0xD800)) for _ in range(8))))
        return {"kind": "hashing", "steps": [{"call": "lora_name_to_id", "args": [name], "named": {}}]}
    arguments = _valid(random)
    if random.random() < 0.5:
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            _spoil(arguments, random)
    names = list(arguments)
    # A wrong name behind too many values would be wrong in two ways, and nothing says which one is told.
    positional = random.randint(0, min(len(names), _PARAMETERS))
    step = {
        "call": "compute_block_hash_for_seq",
        "args": [arguments[name] for name in names[:positional]],
        "named": {name: arguments[name] for name in names[positional:]},
    }
    return {"kind": "hashing", "steps": [step]}


def _valid(random: Random) -> dict[str, Any]:
    block_size = random.choice((1, 2, 3, 4, 16, 32, 64, 2**40))
    count = random.choice((0, 1, random.randint(0, 200), 16, 17, 64))
    limit = random.choice((2, 50_000, 2**32))
    tokens: Any = [random.randrange(limit) for _ in range(count)]
    form = random.random()
    if form < 0.05:
        tokens = {"$range": [count]}
    elif form < 0.1:
        tokens = {random.choice(("$bytes", "$bytearray", "$memoryview")): random.randbytes(count).hex()}
    elif form < 0.15:
        tokens = {"$array": [random.choice("IQ"), tokens]}
    elif form < 0.25:
        tokens = {random.choice(("$tuple", "$deque", "$items")): tokens}
    return {
        "tokens": tokens,
        "kv_block_size": block_size,
        "block_mm_infos": _mm_infos(random) if random.random() < 0.4 else None,
        "lora_name": random.choice(_NAMES) if random.random() < 0.5 else None,
        "is_eagle": random.choice((None, None, False, True)),
        "cache_namespace": random.choice(_NAMES) if random.random() < 0.5 else None,
    }


def _mm_infos(random: Random) -> Any:
    infos = [
        None
        if random.random() < 0.4
        else {
            "mm_objects": [
                {
                    "mm_hash": random.choice((0, 1, 5, 2**64 - 1, random.randrange(2**64))),
                    "offsets": [[random.randrange(9), random.randrange(9)] for _ in range(random.randint(0, 2))],
                }
                for _ in range(random.randint(0, 3))
            ]
        }
        for _ in range(random.randint(0, 6))
    ]
    return {"$tuple": infos} if random.random() < 0.1 else infos


def _wrong(random: Random) -> Any:
    # A copy: it may be spoiled further.
    return deepcopy(random.choice((*_WRONG_VALUES, *_WRONG_NAMES)))


def _spoil(arguments: dict[str, Any], random: Random) -> None:
    """Make one thing wrong."""
    name = random.choice((*arguments, "tokens", "block_mm_infos", "block_mm_infos"))
    value = arguments.get(name)
    draw = random.random()
    if draw < 0.1:
        arguments.pop(name, None)
    elif draw < 0.15:
        arguments[random.choice(("token", "block_size", "x"))] = 1
    elif draw < 0.3 or not isinstance(value, list) or not value:
        arguments[name] = _wrong(random)
    elif draw < 0.5:
        arguments[name] = {random.choice(_WRAPPERS): value}
    else:
        _spoil_inside(value, random)


def _spoil_inside(value: Any, random: Random) -> None:
    """Make one thing wrong in a list or dict, at any depth."""
    keys = list(range(len(value))) if isinstance(value, list) else list(value)
    if not keys:
        return
    key = random.choice(keys)
    inner = value[key]
    draw = random.random()
    if isinstance(inner, (list, dict)) and inner and draw < 0.7:
        _spoil_inside(inner, random)
    elif draw < 0.8:
        value[key] = _wrong(random)
    elif isinstance(value, dict):
        del value[key]
        if random.random() < 0.5:
            value[random.choice(("other", "mm_hash", "offsets", "mm_objects"))] = _wrong(random)
    elif isinstance(inner, list):
        value[key] = {random.choice(_WRAPPERS[:5]): inner}
    elif isinstance(inner, dict):
        value[key] = {"$dict": [[random.choice((1, None, "mm_hash")), 1], *map(list, inner.items())]}

"""Random scripts for ``RadixTree``: mostly events that fit, some that do not, some that are none."""

from __future__ import annotations

import json
from random import Random
from typing import Any

_U64 = 2**64
_WORKERS = ((1, 0), (1, 1), (2, 0), (3, 0), (2**64 - 1, 2**32 - 1))
_HOSTILE_NUMBERS = ("-1", "1.0", "-0", "1e3", "18446744073709551616", "4294967296", '"1"', "null", "true", "[]", "{}",
                    "NaN", "01", "1.5e-5", "1e400", "-", "", "99999999999999999999999")  # fmt: skip
_HOSTILE_BYTES = b'{}[]":,0159-+.eE\\ntru\x00\x1f \n\xff\xc3\xa9u'
_HOSTILE_ARGUMENTS = (None, True, 1.5, "x", -1, _U64, [], {"$bytes": "7b7d"}, {"$index": 3}, {"$index": "x"})
_NAMES = ("event_id", "data", "dp_rank", "stored", "removed", "cleared", "blocks", "block_hashes", "block_hash",
          "tokens_hash", "parent_hash", "start_position", "mm_extra_info", "mm_objects", "mm_hash", "offsets",
          "other")  # fmt: skip


class _World:
    """The chains of one script: a small tree of tokens hashes, and how engines name the blocks.

    Workers mostly give a chain the same names (as engines with one hash function do), sometimes names of their own,
    and now and then a name that is taken.
    """

    def __init__(self, random: Random) -> None:
        self.random = random
        self.wide = random.choice((1, 2, 3, 20))
        self.longest = random.choice((3, 6, 12, 40))
        self.own_names = random.choice((0.0, 0.0, 0.1, 0.5, 1.0))
        self.taken_names = random.choice((0.0, 0.0, 0.02, 0.2, 0.6))
        self.workers = random.sample(_WORKERS, random.randint(1, 4))
        self.base = random.choice((0, 1000, _U64 - 5000))
        self.names: dict[Any, int] = {}
        # Chains that each worker holds, for all that the script knows: (tokens hashes, block hashes).
        self.held: dict[tuple[int, int], list[tuple[list[int], list[int]]]] = {worker: [] for worker in self.workers}

    def tokens(self, count: int) -> list[int]:
        return [self.base + self.random.randrange(self.wide) for _ in range(count)]

    def name(self, worker: tuple[int, int], chain: tuple[int, ...]) -> int:
        if self.names and self.random.random() < self.taken_names:
            return self.random.choice(list(self.names.values()))
        key: Any = (worker, chain) if self.random.random() < self.own_names else chain
        return self.names.setdefault(key, self.base + 100 + len(self.names))

    def blocks(self, worker: tuple[int, int], before: list[int], tokens: list[int]) -> list[int]:
        return [self.name(worker, (*before, *tokens[: place + 1])) for place in range(len(tokens))]

    def some_chain(self) -> tuple[list[int], list[int]]:
        chains = [chain for held in self.held.values() for chain in held]
        return self.random.choice(chains) if chains else ([], [])


def make_script(random: Random) -> dict[str, Any]:
    """One script of up to a hundred steps; its last one is a dump."""
    world = _World(random)
    steps = []
    hostile = random.choice((0.0, 0.05, 0.3))
    for _ in range(random.randint(1, random.choice((8, 30, 100)))):
        steps.append(_hostile_step(world) if random.random() < hostile else _step(world))
    return {"kind": "radix", "steps": [*steps, {"call": "dump_tree_as_events", "args": []}]}


def _step(world: _World) -> dict[str, Any]:
    random = world.random
    draw = random.random()
    worker = random.choice(world.workers)
    if draw < 0.4:
        return _apply(worker, _stored(world, worker), random)
    if draw < 0.6:
        return _apply(worker, _removed(world, worker), random)
    if draw < 0.92:
        return {"call": "find_matches", "args": [_query(world), random.random() < 0.3]}
    if draw < 0.95:
        return {"call": "dump_tree_as_events", "args": []}
    if draw < 0.975:
        world.held[worker] = []
        return _apply(worker, random.choice(("cleared", {"cleared": None})), random)
    for other in world.workers:
        if other[0] == worker[0]:
            world.held[other] = []
    return {"call": random.choice(("remove_worker", "clear_all_blocks")), "args": [worker[0]]}


def _stored(world: _World, worker: tuple[int, int]) -> dict[str, Any]:
    random = world.random
    before, names = [], []
    if random.random() < 0.6:
        held = world.held[worker] if world.held[worker] and random.random() < 0.9 else [world.some_chain()]
        chain_tokens, chain_names = random.choice(held)
        cut = random.choice((len(chain_tokens), random.randint(0, len(chain_tokens))))
        before, names = chain_tokens[:cut], chain_names[:cut]
    count = random.choice((0, 1, 1, random.randint(1, world.longest)))
    if random.random() < 0.3:
        # The same again, or the beginning of what somebody holds.
        chain_tokens, _ = world.some_chain()
        tokens = chain_tokens[len(before) :][:count] if chain_tokens[: len(before)] == before else []
    else:
        tokens = world.tokens(count)
    blocks = world.blocks(worker, before, tokens)
    parent = names[-1] if names else None
    if random.random() < 0.02:
        parent = random.choice(blocks or [7])
    world.held[worker].append((before + tokens, names + blocks))
    stored: dict[str, Any] = {
        "blocks": [{"block_hash": block, "tokens_hash": token} for block, token in zip(blocks, tokens, strict=True)]
    }
    if parent is not None or random.random() < 0.5:
        stored["parent_hash"] = parent
    if random.random() < 0.1:
        stored["start_position"] = random.choice((None, 0, 2**32 - 1))
    if random.random() < 0.1:
        for block in stored["blocks"]:
            block["mm_extra_info"] = random.choice((None, {"mm_objects": [{"mm_hash": 1, "offsets": [[0, 5]]}]}))
    return {"stored": stored}


def _removed(world: _World, worker: tuple[int, int]) -> dict[str, Any]:
    random = world.random
    held = world.held[worker] if world.held[worker] and random.random() < 0.95 else [world.some_chain()]
    _, names = random.choice(held) if held else ([], [])
    start = random.randint(0, len(names))
    hashes = names[start : start + random.choice((1, 1, 2, 4, len(names)))]
    draw = random.random()
    if draw < 0.3:
        hashes = hashes[::-1]
    elif draw < 0.4:
        hashes = random.sample(hashes, len(hashes))
    if random.random() < 0.1:
        hashes = [*hashes, *random.choice(held)[1][-2:]]
    if random.random() < 0.05:
        hashes.insert(random.randint(0, len(hashes)), random.choice((5, *hashes)))
    return {"removed": {"block_hashes": hashes}}


def _query(world: _World) -> list[int]:
    tokens, _ = world.some_chain()
    draw = world.random.random()
    if draw < 0.2:
        return world.tokens(world.random.randint(0, world.longest))
    if draw < 0.5:
        return tokens[: world.random.randint(0, len(tokens))]
    return tokens + world.tokens(world.random.randint(0, 2))


def _apply(worker: tuple[int, int], data: Any, random: Random) -> dict[str, Any]:
    event: dict[str, Any] = {"event_id": random.choice((0, random.randrange(_U64))), "data": data}
    if worker[1] or random.random() < 0.5:
        event["dp_rank"] = worker[1]
    if random.random() < 0.1:
        event["storage_tier"] = random.choice(("disk", 1.5, None, [{"a": {}}]))
    members = list(event.items())
    if random.random() < 0.2:
        random.shuffle(members)
    separators = random.choice((None, (",", ":"), (" ,\n", "\t: ")))
    text = json.dumps(dict(members), separators=separators)
    return {"call": "apply_event", "args": [worker[0], {"$utf8": text}]}


def _hostile_step(world: _World) -> dict[str, Any]:
    random = world.random
    step = _step(world)
    if step["call"] != "apply_event" or random.random() < 0.1:
        if step["args"]:
            step["args"][random.randrange(len(step["args"]))] = random.choice(_HOSTILE_ARGUMENTS)
        return step
    worker, encoded = step["args"]
    text = encoded["$utf8"]
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        text = _spoil(text, random)
    if isinstance(text, bytes):
        return {"call": "apply_event", "args": [worker, {"$bytes": text.hex()}]}
    return {"call": "apply_event", "args": [worker, {"$utf8": text}]}


def _spoil(text: Any, random: Random) -> Any:
    """The text of an event with one thing wrong."""
    if isinstance(text, bytes):
        return text
    draw = random.random()
    if draw < 0.1:
        return text[: random.randint(0, len(text))]
    if draw < 0.3:
        raw = bytearray(text.encode())
        for _ in range(random.randint(1, 2)):
            place = random.randint(0, len(raw))
            raw[place : place + random.randint(0, 1)] = bytes([random.choice(_HOSTILE_BYTES)])[: random.randint(0, 1)]
        return bytes(raw)
    if draw < 0.55:
        return _spoil_number(text, random)
    if draw < 0.75:
        name, other = random.choice(_NAMES), random.choice(_NAMES)
        return text.replace(f'"{name}"', f'"{other}"', 1)
    if draw < 0.85:
        # A member twice, or one that nobody knows.
        name = random.choice(_NAMES)
        value = random.choice(("1", "null", "[]", "{}", '"x"', '[1,{"a":[]}]', '"\\ud800"', "1e999"))
        place = text.find("{", random.randint(0, len(text)))
        return text[: place + 1] + f'"{name}": {value}, ' + text[place + 1 :]
    try:
        return json.dumps(_positional(json.loads(text), random))
    except ValueError:
        return text[1:]


def _spoil_number(text: str, random: Random) -> str:
    digits = [place for place, char in enumerate(text) if char.isdigit() and not text[place - 1].isdigit()]
    if not digits:
        return text + random.choice((" ", "x", "\n\n]"))
    start = random.choice(digits)
    end = start
    while end < len(text) and text[end].isdigit():
        end += 1
    return text[:start] + random.choice(_HOSTILE_NUMBERS) + text[end:]


def _positional(value: Any, random: Random) -> Any:
    """Some structs as arrays of their members, which is right if the members stand in order and are complete."""
    if isinstance(value, list):
        return [_positional(item, random) for item in value]
    if not isinstance(value, dict):
        return value
    if random.random() < 0.4:
        return [_positional(item, random) for item in value.values()]
    return {name: _positional(item, random) for name, item in value.items()}

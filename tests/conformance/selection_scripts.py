"""Random scripts for ``SelectionService``, without what is random or unstable by nature.

No choice between equal costs: every worker has a taint of its own, and a request that leaves a choice prefers them
unequally; workers with several ranks are pinned. No queue that could hold a request back. No empty token list, which
stops the reference's partition for good. A worker that is known is changed or deleted only with nothing after it that
asks for loads, since the reference takes its time. Decay fractions are sums of powers of two: the reference adds and
subtracts weights as it goes, and rounds what is left of 0.5 down or up.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from random import Random
from typing import Any
from zlib import crc32

import msgspec

_BLOCK = 4
_PARTITIONS: tuple[dict[str, str], ...] = ({}, {"model_name": "m2", "routing_group": "g"})
_WORKER_IDS = (1, 2, 3, 492389, 2**64 - 1)
# Nothing that is a prompt of less than one block (see above), and no worker of very many ranks.
_WRONG_VALUES = (None, True, False, 0, 0.1, 1.5, 1e300, -1, 2**32, 2**63, -(2**63) - 1, 2**64, 2**127, -(2**127),
                 2**128, -(2**128), 10**400, "x", "", "é\"\n", "required", [1, 2, 3, 4, 5], ["x"], [None], {"a": 1},
                 {"required": 1}, {"$dict": [[0, 1]]}, {"$dict": [[None, 1]]}, {"$tuple": [1, 2, 3, 4, 5]},
                 {"$bytes": "0102030405"}, {"$bytes": "ff"}, {"$bytearray": "61626364"}, {"$memoryview": "0102030405"},
                 {"$deque": [1, 2, 3, 4, 5]}, {"$set": ["x"]}, {"$frozenset": [1, 2, 3, 4, 5]}, {"$range": [5]},
                 {"$array": ["Q", [1, 2, 3, 4, 5]]}, {"$items": [1, 2, 3, 4, 5]}, {"$iterable": [1]}, {"$keys": ["x"]},
                 {"$index": 3}, {"$text": "x"}, {"$float": "nan"}, {"$float": "-inf"}, {"$utf8": "x"},
                 {"worker_id": 1, "dp_rank": 0}, [5, [[0, 1]]], [[[[7, []]]]],
                 {"routing_token_ids": [1, 2, 3, 4, 5], "block_mm_infos": [None]})  # fmt: skip
_ENDPOINTS = ("tcp://127.0.0.1:1", "tcp://a:0", "tcp://a", "tcp://:1", "tcp://a:70000", "tcp://[::1", "ipc://", "x")
_NAMES = ("model_name", "routing_group", "selection_id", "session_id", "affinity_target", "router_config_override",
          "expected_output_tokens", "priority_jump", "strict_priority", "policy_class", "pinned_worker",
          "allowed_worker_ids", "worker_id", "dp_rank", "effective_prefill_tokens", "track_prefill_tokens", "token_ids",
          "block_mm_infos", "mm_routing_info", "lora_name", "cache_salt", "is_eagle", "block_hashes", "sequence_hashes",
          "isl_tokens", "other")  # fmt: skip
_WORKER_NAMES = ("endpoint", "kv_events_endpoint", "kv_events_endpoints", "replay_endpoint", "block_size",
                 "data_parallel_start_rank", "data_parallel_size", "max_num_batched_tokens", "total_kv_blocks",
                 "stable_routing_id", "is_eagle", "taints", "topology_domains", "kv_transfer_domain",
                 "kv_transfer_enforcement", "kv_transfer_preferred_weight", "model_name", "routing_group", "worker_id",
                 "other")  # fmt: skip
_ENV = {
    "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": ("0.5", "0.6", "3.0"),
    "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY": ("0.7", "2.0"),
    "DYN_ROUTER_PREFILL_LOAD_SCALE": ("0.7", "3.0"),
    "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT": ("0.3", "2.5"),
    "DYN_ROUTER_TRACK_PREFILL_TOKENS": ("false",),
    "DYN_ROUTER_QUEUE_THRESHOLD": ("1000.0",),
}
_OVERRIDES: dict[str, tuple[Any, ...]] = {
    "overlap_score_credit": (0.5, 2),
    "prefill_load_scale": (0.5, 3.0),
    "overlap_score_weight": (0.5, 2.0),
    "router_temperature": (0.0, None),
    "track_prefill_tokens": (True, False),
    "shared_cache_multiplier": (0.5, 1),
    "decode_active_request_weight": (3.0,),
    "unknown": (1,),
}
_WRONG_OVERRIDES: dict[str, tuple[Any, ...]] = {
    "overlap_score_credit": (-1.0, "x"),
    "prefill_load_scale": (-1.0,),
    "overlap_score_weight": (-0.5,),
    "router_temperature": (-1.0,),
    "shared_cache_multiplier": (2.0,),
}


class _World:
    """The workers of one script and the prompts that they are asked for."""

    def __init__(self, random: Random, hostile: bool) -> None:
        self.random = random
        self.hostile = hostile
        self.events = random.random() < 0.3
        self.wide = random.random() < 0.2
        self.partitions = _PARTITIONS[: random.choice((1, 1, 2))]
        self.workers: dict[int, dict[str, Any]] = {}
        self.held: dict[int, list[int]] = {}
        self.prompts = [self.tokens(random.randint(1, 24)) for _ in range(3)]

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(3) for _ in range(count)]

    def env(self) -> dict[str, str]:
        chosen = {name: self.random.choice(values) for name, values in _ENV.items() if self.random.random() < 0.2}
        return chosen if self.events else {**chosen, "DYN_ROUTER_USE_KV_EVENTS": "false"}

    def of(self, partition: dict[str, str]) -> list[int]:
        return [number for number, worker in self.workers.items() if partition.items() <= worker.items()]


def make_script(random: Random) -> dict[str, Any]:
    """One script of up to forty steps, with requests that can be read."""
    return _make_script(_World(random, hostile=False))


def make_hostile_script(random: Random) -> dict[str, Any]:
    """The same with requests some of which cannot be read."""
    return _make_script(_World(random, hostile=True))


def _make_script(world: _World) -> dict[str, Any]:
    random = world.random
    steps: list[dict[str, Any]] = []
    for number in random.sample(_WORKER_IDS, random.randint(0, 4)):
        steps.append(_upsert(world, number))
        if world.events:
            steps += _publish(world, number)
    steps += [_step(world) for _ in range(random.randint(3, 30))]
    steps += [_ending(world) for _ in range(random.randint(0, 4))]
    return {"kind": "selection", "env": world.env(), "steps": steps}


def _call(name: str, *args: Any, **named: Any) -> dict[str, Any]:
    return {"call": name, "args": list(args), "named": named}


def _upsert(world: _World, number: int) -> dict[str, Any]:
    random = world.random
    worker: dict[str, Any] = {
        "worker_id": number,
        **random.choice(world.partitions),
        "endpoint": f"http://w{number}",
        "block_size": _BLOCK,
        "max_num_batched_tokens": 8192,
        "taints": [f"w{number}", *random.sample(("gpu", "big"), random.randint(0, 2))],
    }
    if world.events:
        worker["kv_events_endpoint"] = f"@{number}"
    elif world.wide and random.random() < 0.5:
        worker["data_parallel_size"] = 2
        worker["data_parallel_start_rank"] = random.choice((0, 3))
    world.workers[number] = worker
    return _call("upsert_worker", worker)


def _publish(world: _World, number: int) -> list[dict[str, Any]]:
    """The beginning of a prompt, as blocks that the worker's engine has stored."""
    tokens = world.random.choice(world.prompts)
    blocks = world.random.randint(0, len(tokens) // _BLOCK)
    if not blocks:
        return []
    stored = {
        "type": "BlockStored",
        "block_hashes": [1000 + place for place in range(blocks)],
        "parent_block_hash": None,
        "token_ids": tokens[: blocks * _BLOCK],
        "block_size": _BLOCK,
        "medium": world.random.choice((None, "GPU")),
    }
    partition = {name: world.workers[number][name] for name in ("model_name", "routing_group")
                 if name in world.workers[number]}  # fmt: skip
    return [
        {
            "call": "publish",
            "engine": f"@{number}",
            "batch": {"$bytes": msgspec.msgpack.encode([0.0, [stored], None]).hex()},
            "request": {**partition, "token_ids": tokens[: blocks * _BLOCK]},
            "worker": [number, 0],
            "blocks": blocks,
        }
    ]


def _step(world: _World) -> dict[str, Any]:
    random = world.random
    partition = random.choice(world.partitions)
    if world.hostile and random.random() < 0.05:
        return _wrong_call(random)
    name = random.choice(
        ("select", "select", "select_and_reserve", "select_and_reserve", "select_and_reserve", "create_reservation",
         "prefill_complete", "add_output_block", "add_output_block", "free_reservation", "loads", "potential_loads",
         "overlap_scores", "list_workers", "ready")
    )  # fmt: skip
    if name == "ready":
        return _call(name)
    if name in ("loads", "list_workers"):
        return _call(name, **(random.choice(({}, partition, {"model_name": "default"}))))
    selection_id = f"{partition.get('model_name', '')}{random.choice('abc')}"
    if name in ("prefill_complete", "free_reservation"):
        return _call(name, selection_id)
    if name == "add_output_block":
        fraction = random.choice((None, 0.125, 0.25, 0.5, 1.0, 1, -0.5, 1.5))
        return _call(name, selection_id, **random.choice(({}, {"decay_fraction": fraction})))
    request: dict[str, Any] = {**partition, **_prompt(world)}
    if name == "create_reservation":
        request = _reservation(world, partition, request, selection_id)
    elif name in ("select", "select_and_reserve"):
        request |= _wishes(world, partition)
        if random.random() < 0.8:
            request["selection_id"] = selection_id
    if random.random() < 0.2:
        overrides = _WRONG_OVERRIDES if world.hostile and random.random() < 0.3 else _OVERRIDES
        request["router_config_override"] = {
            option: random.choice(values) for option, values in overrides.items() if random.random() < 0.3
        }
    return _call(name, _spoiled(request, random) if world.hostile and random.random() < 0.2 else request)


def _wrong_call(random: Random) -> dict[str, Any]:
    """A call with an argument of the wrong kind, which never names a booking."""
    name = random.choice(
        ("loads", "list_workers", "prefill_complete", "free_reservation", "add_output_block", "register_replica_peer",
         "deregister_replica_peer", "recover_indexer_from_peers", "list_replica_peers", "indexer_snapshot")
    )  # fmt: skip
    value = deepcopy(random.choice(_WRONG_VALUES))
    if name.endswith("register_replica_peer") and (isinstance(value, str) or value == {"$text": "x"}):
        # Refused by both as there is no replica sync: by the reference with a bare Exception.
        value = None
    if name in ("list_replica_peers", "indexer_snapshot"):
        return _call(name)
    if name in ("loads", "list_workers"):
        return _call(name, **{random.choice(("model_name", "routing_group")): value})
    if name == "add_output_block" and random.random() < 0.5:
        return _call(name, "nobody's", decay_fraction=value)
    return _call(name, value)


def _prompt(world: _World) -> dict[str, Any]:
    random = world.random
    tokens = random.choice(world.prompts)[: random.choice((24, 24, random.randint(1, 24)))]
    # At least one block, for Eagle too: without any, all workers may cost nothing.
    tokens = (tokens + world.tokens(random.randint(0, 6)))[:24]
    tokens += [7] * (_BLOCK + 1 - len(tokens))
    if random.random() < 0.1:
        ends = range(_BLOCK, len(tokens) + 1, _BLOCK)
        prompt: dict[str, Any] = {
            "block_hashes": [crc32(bytes(tokens[end - _BLOCK : end])) - 2**31 for end in ends],
            "sequence_hashes": [(crc32(bytes(tokens[:end])) - 2**31) * 2**32 for end in ends],
            "isl_tokens": len(tokens),
        }
        if world.hostile and random.random() < 0.2:
            del prompt[random.choice(list(prompt))]
        return prompt
    prompt = {"token_ids": random.choice((tokens, {"$tuple": tokens}))}
    if random.random() < 0.1:
        prompt["lora_name"] = random.choice((None, "", "a"))
    if random.random() < 0.1:
        prompt["cache_salt"] = random.choice((None, "", "a"))
    if random.random() < 0.05:
        prompt["is_eagle"] = random.choice((None, False, True))
    if random.random() < 0.1:
        infos = [None, {"mm_objects": [{"mm_hash": 5, "offsets": [[0, 2]]}]}]
        prompt |= random.choice(
            ({"block_mm_infos": infos},
             {"mm_routing_info": {"routing_token_ids": tokens[::-1], "block_mm_infos": infos}},
             {"mm_routing_info": {"routing_token_ids": []}})
        )  # fmt: skip
    return prompt


def _wishes(world: _World, partition: dict[str, str]) -> dict[str, Any]:
    """Where the request may go; if to several workers, with one liked best."""
    random = world.random
    there = world.of(partition)
    wishes: dict[str, Any] = {}
    wide = any("data_parallel_size" in world.workers[number] for number in there)
    # A hostile request may end up in the other partition.
    if (there and (wide or random.random() < 0.2)) or (world.hostile and world.wide):
        number = random.choice((*there, random.choice(_WORKER_IDS)))
        first = world.workers.get(number, {}).get("data_parallel_start_rank", 0)
        wishes["pinned_worker"] = {"worker_id": number, "dp_rank": first + random.choice((0, 0, 1))}
    likes = {f"w{number}": round(random.uniform(-1.5, 1.5), 6) for number in _WORKER_IDS}
    constraints: dict[str, Any] = {"preferred_taints": likes}
    if random.random() < 0.2:
        constraints["required_taints"] = random.choice(([], ["gpu"], ["gpu", "big"], ["w1"]))
    wishes["routing_constraints"] = constraints
    if random.random() < 0.2:
        wishes["allowed_worker_ids"] = random.choice(
            (None, [], random.sample(_WORKER_IDS, random.randint(1, 4)), {"$tuple": list(there)})
        )
    if random.random() < 0.1:
        wishes |= {"expected_output_tokens": 5, "priority_jump": 1.5, "strict_priority": 2, "session_id": "s"}
    return wishes


def _reservation(
    world: _World, partition: dict[str, str], request: dict[str, Any], selection_id: str
) -> dict[str, Any]:
    random = world.random
    if random.random() < 0.5:
        return {**partition, "selection_id": selection_id}
    request |= {"selection_id": selection_id, "worker_id": random.choice((*world.of(partition), 3))}
    if random.random() < 0.5:
        request["effective_prefill_tokens"] = random.choice((None, 0, 1, 4, 4, 100))
    if random.random() < 0.3:
        request["dp_rank"] = random.choice((None, 0, 1, 3))
    if random.random() < 0.3:
        request["track_prefill_tokens"] = random.choice((None, True, False))
    return request


def _ending(world: _World) -> dict[str, Any]:
    """Steps after which loads are not asked for any more."""
    random = world.random
    number = random.choice(_WORKER_IDS)
    name = random.choice(("upsert_worker", "upsert_worker", "delete_worker", "list_workers", "ready"))
    if name == "delete_worker":
        return _call(name, random.choice(_WRONG_VALUES) if world.hostile and random.random() < 0.3 else number)
    if name == "upsert_worker":
        worker = {**deepcopy(world.workers.get(number) or {"worker_id": number}), "kv_events_endpoints": {}}
        member, values = random.choice(
            (("endpoint", (None, "", "http://new")), ("block_size", (None, 0, 8)), ("is_eagle", (None, True)),
             ("taints", ([], ["a", "b", "a"])), ("data_parallel_size", (None, 0, 2)), ("other", (5,)),
             ("max_num_batched_tokens", (None, 16)), ("topology_domains", ({}, {"zone": "a"})),
             ("replay_endpoint", _ENDPOINTS), ("kv_events_endpoint", _ENDPOINTS))
        )  # fmt: skip
        worker[member] = random.choice(values)
        if not world.hostile:
            return _call(name, worker)
        if random.random() < 0.5:
            return _call("patch_worker", number, _spoiled(worker, random, _WORKER_NAMES))
        return _call(name, _spoiled(worker, random, _WORKER_NAMES))
    return _call(name)


def _spoiled(request: dict[str, Any], random: Random, names: Sequence[str] = _NAMES) -> Any:
    """The request with some things wrong, in any order."""
    if random.random() < 0.05:
        return random.choice(_WRONG_VALUES)
    request = deepcopy(request)
    pinned = "pinned_worker" in request
    for _ in range(random.choice((1, 1, 2, 3))):
        _spoil(request, random, names)
    if pinned and request.get("pinned_worker") is None:
        # Without it there could be a choice between ranks that cost the same.
        request["pinned_worker"] = 5
    members = list(request.items())
    random.shuffle(members)
    if random.random() < 0.05:
        return {"$dict": [*map(list, members), [random.choice((5, None, {"$bytes": "61"})), 1]]}
    return dict(members)


def _spoil(request: dict[str, Any], random: Random, names: Sequence[str]) -> None:
    # Without its likes a request could have a choice between equal costs.
    present = [name for name in request if name != "routing_constraints"]
    draw = random.random()
    if draw < 0.15 and present:
        del request[random.choice(present)]
    elif draw < 0.4:
        request[random.choice(names)] = deepcopy(random.choice(_WRONG_VALUES))
    elif present:
        name = random.choice(present)
        request[name] = _spoiled_value(request[name], random)


def _spoiled_value(value: Any, random: Random) -> Any:
    """A value with one thing wrong, at any depth."""
    places: list[Any] = list(range(len(value))) if isinstance(value, list) else []
    if isinstance(value, dict) and not any(name.startswith("$") for name in value):
        places = list(value)
    if not places or random.random() < 0.3:
        return deepcopy(random.choice(_WRONG_VALUES))
    place = random.choice(places)
    draw = random.random()
    if isinstance(value, list) and draw < 0.1:
        # Shorter lists of tokens are no whole block.
        value.append(value[place])
    elif isinstance(value, dict) and draw < 0.2:
        del value[place]
    elif isinstance(value, dict) and draw < 0.3:
        return {
            "$dict": [[random.choice((0, 1, 7, 300, 2**40, -1, None, {"$utf8": "a"})), 1], *map(list, value.items())]
        }
    else:
        value[place] = _spoiled_value(value[place], random)
    return value

"""Plays scripts on a module with the names of ``dynamo.llm``. Runs in both interpreters: standard library only.

A script is JSON: ``{"kind": "hashing" | "radix" | "selection", "steps": [...]}``; playing it gives one result a step:
``{"ok": value}`` or ``{"error": {"type", "message"}}``. Values that JSON does not have are objects with one member
that begins with ``$`` (``decode``).
"""

from __future__ import annotations

import json
from array import array
from collections import deque
from typing import Any

try:
    from tests.conformance.selection_player import play_selection
except ImportError:
    # In the reference's interpreter this folder is no package.
    from selection_player import play_selection  # type: ignore[no-redef]


class Index:
    """An int to those who ask for one."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __index__(self) -> Any:
        return self._value


class Items:
    """Has items by number, but does not call itself a sequence."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def __getitem__(self, place: int) -> Any:
        return self._values[place]

    def __len__(self) -> int:
        return len(self._values)


class Iterable:
    """Can be iterated over, and nothing else."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def __iter__(self) -> Any:
        return iter(self._values)


class Text(str):
    """A str that is none exactly."""

    __slots__ = ()


_DECODERS = {
    "$bytes": bytes.fromhex,
    "$utf8": str.encode,
    "$bytearray": bytearray.fromhex,
    "$memoryview": lambda text: memoryview(bytes.fromhex(text)),
    "$float": float,
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$deque": deque,
    "$keys": lambda values: dict.fromkeys(values).keys(),
    "$range": lambda bounds: range(*bounds),
    "$array": lambda pair: array(*pair),
    "$index": Index,
    "$items": Items,
    "$iterable": Iterable,
    "$iterator": iter,
    "$text": Text,
    "$dict": lambda pairs: {key: value for key, value in pairs},  # noqa: C416 - keys of any kind
}


def decode(value: Any) -> Any:
    """The value that a JSON value stands for."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((name, content),) = value.items()
        if name in _DECODERS:
            return _DECODERS[name](decode(content))
    return {name: decode(content) for name, content in value.items()}


def play(llm: Any, script: dict[str, Any]) -> list[dict[str, Any]]:
    """The result of every step."""
    return _PLAYERS[script["kind"]](llm, script)


def _play_hashing(llm: Any, script: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        _outcome(lambda step=step: getattr(llm, step["call"])(*decode(step["args"]), **decode(step["named"])))
        for step in script["steps"]
    ]


def _play_radix(llm: Any, script: dict[str, Any]) -> list[dict[str, Any]]:
    tree = llm.RadixTree()
    return [_outcome(lambda step=step: _radix_call(tree, step)) for step in script["steps"]]


def _radix_call(tree: Any, step: dict[str, Any]) -> Any:
    result = getattr(tree, step["call"])(*decode(step["args"]))
    if step["call"] == "find_matches":
        return {
            "scores": sorted([*worker, count] for worker, count in result.scores.items()),
            "frequencies": result.frequencies,
        }
    if step["call"] == "dump_tree_as_events":
        return _unordered(result)
    return result


def _unordered(dump: list[str]) -> list[str]:
    """A dump without its order, which is that of a hash map, and without the event ids that go with the order."""
    items = [json.loads(text) for text in dump]
    if [item["event"].pop("event_id") for item in items] != list(range(len(items))):
        raise AssertionError("the event ids of a dump count from 0")
    return sorted(json.dumps(item) for item in items)


def _outcome(call: Any) -> dict[str, Any]:
    try:
        return {"ok": call()}
    except BaseException as error:
        # Also a panic of the reference, which is no Exception; it ends as a difference.
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return {"error": {"type": type(error).__name__, "message": str(error)}}


_PLAYERS = {
    "hashing": _play_hashing,
    "radix": _play_radix,
    "selection": lambda llm, script: play_selection(llm, script, decode),
}

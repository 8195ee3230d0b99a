"""Reading YAML of a known shape; refusals tell the place: ``policy_classes[0].quantum: … at line 8 column 14``.

The text is composed to nodes, never constructed to objects: tags name nothing, and what a scalar is follows from YAML
1.2's core schema (so ``no`` and ``2020-01-01`` are text), as in Dynamo, whose words the refusals are too. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import yaml

from dynamo_es.router.config_json import expected_names

MAX_DEPTH = 32
"""Collections within each other; the deepest that means anything, save in free parameters, is 6."""
MAX_VALUES = 100_000
"""Values of one document, where an alias counts with all that it stands for."""
_U64_LIMIT = 2**64
_INTEGER_CHARS = 40
_NULLS = ("", "~", "null", "Null", "NULL")
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*|0x[0-9a-fA-F]+|0o[0-7]+|0b[01]+)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\0"}


class DocumentRefusal(ValueError):
    """The document is not what was to be read; the text says what is wrong, and where."""


Reader = Callable[["NodeReader", yaml.Node, str], Any]
"""Reads a node, which stands at the path that is given for messages."""


class Entry(NamedTuple):
    """One field of a mapping. A field that is not ``required`` may be absent, and is then not among the values."""

    read: Reader
    required: bool = False


class NodeReader:
    """Reads the nodes of one document. All methods raise ``DocumentRefusal``."""

    def __init__(self) -> None:
        self._values = 0

    def fields(self, node: yaml.Node, path: str, struct: str, entries: Mapping[str, Entry]) -> dict[str, Any]:
        """The values of a mapping with these fields and no others; ``struct`` names it in messages."""
        self._count(path)
        if not isinstance(node, yaml.MappingNode):
            refuse(node, path, f"invalid type: {_describe(node)}, expected struct {struct}")
        values: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                refuse(key, path, f"invalid type: {_describe(key)}, expected field identifier")
            name = key.value
            if name not in entries:
                refuse(key, path, f"unknown field `{name}`, {expected_names(list(entries))}")
            if name in values:
                refuse(node, path, f"duplicate field `{name}`")
            values[name] = entries[name].read(self, value, f"{path}.{name}" if path else name)
        for name, entry in entries.items():
            if entry.required and name not in values:
                refuse(node, path, f"missing field `{name}`")
        return values

    def mapping(self, node: yaml.Node, path: str, read: Reader) -> dict[str, Any]:
        """A mapping with names of any kind, in its order."""
        self._count(path)
        if not isinstance(node, yaml.MappingNode):
            refuse(node, path, f"invalid type: {_describe(node)}, expected a map")
        values: dict[str, Any] = {}
        for key, value in node.value:
            name = self.text(key, path)
            if name in values:
                refuse(key, path, f"duplicate entry `{name}`")
            values[name] = read(self, value, f"{path}.{name}")
        return values

    def sequence(self, node: yaml.Node, path: str, read: Reader) -> list[Any]:
        """A sequence of values of one kind."""
        self._count(path)
        if not isinstance(node, yaml.SequenceNode):
            refuse(node, path, f"invalid type: {_describe(node)}, expected a sequence")
        return [read(self, item, f"{path}[{place}]") for place, item in enumerate(node.value)]

    def text(self, node: yaml.Node, path: str) -> str:
        """Text; a scalar of any kind is taken as it is written."""
        self._count(path)
        if not isinstance(node, yaml.ScalarNode):
            refuse(node, path, f"invalid type: {_describe(node)}, expected a string")
        return str(node.value)

    def word(self, node: yaml.Node, path: str, known: Sequence[str]) -> str:
        """One of ``known``."""
        self._count(path)
        if not isinstance(node, yaml.ScalarNode):
            refuse(node, path, f"invalid type: {_describe(node)}, expected a YAML tag starting with '!'")
        if node.value not in known:
            refuse(node, path, f"unknown variant `{node.value}`, {expected_names(known)}")
        return str(node.value)

    def unsigned(self, node: yaml.Node, path: str) -> int:
        """An integer of 0 to 2^64 - 1."""
        self._count(path)
        value = scalar_value(node)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _U64_LIMIT:
            refuse(node, path, f"invalid type: {_describe(node)}, expected usize")
        return value

    def real(self, node: yaml.Node, path: str) -> float:
        """A number."""
        self._count(path)
        value = scalar_value(node)
        if not isinstance(value, int | float) or isinstance(value, bool):
            refuse(node, path, f"invalid type: {_describe(node)}, expected f64")
        return float(value)

    def boolean(self, node: yaml.Node, path: str) -> bool:
        """True or false."""
        self._count(path)
        value = scalar_value(node)
        if not isinstance(value, bool):
            refuse(node, path, f"invalid type: {_describe(node)}, expected a boolean")
        return value

    def plain(self, node: yaml.Node, path: str, depth: int = 0) -> Any:
        """Plain data of any shape: dicts with text as keys, lists, and scalars."""
        if depth > MAX_DEPTH:
            refuse(node, path, f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path, lambda reader, value, place: reader.plain(value, place, depth + 1))
        if isinstance(node, yaml.SequenceNode):
            return self.sequence(node, path, lambda reader, value, place: reader.plain(value, place, depth + 1))
        self._count(path)
        return scalar_value(node)

    def _count(self, path: str) -> None:
        self._values += 1
        if self._values > MAX_VALUES:
            raise DocumentRefusal(f"{path}: more than {MAX_VALUES} values, with aliases expanded")


def compose_document(text: str) -> yaml.Node | None:
    """The root node; None if the document is empty.

    Raises:
        DocumentRefusal: It is no YAML, more than one document, or nested too deeply.
    """
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise DocumentRefusal(f"nested deeper than {MAX_DEPTH} levels{_place(event.start_mark)}")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        context = f", {error.context}" if error.context else ""
        raise DocumentRefusal(f"{error.problem}{_place(error.problem_mark)}{context}") from error
    except yaml.YAMLError as error:
        raise DocumentRefusal(" ".join(str(error).split())) from error
    if isinstance(node, yaml.ScalarNode) and node.style is None and node.value == "":
        return None
    return node


def nullable(read: Reader) -> Reader:
    """A reader that gives None for null."""
    return lambda reader, node, path: None if scalar_value(node) is None else read(reader, node, path)


def scalar_value(node: yaml.Node) -> Any:
    """What a scalar stands for: None, bool, int, float or text. A collection is itself."""
    if not isinstance(node, yaml.ScalarNode):
        return node
    text = str(node.value)
    return text if node.style is not None else _unquoted_value(text)


def _unquoted_value(text: str) -> bool | float | str | None:
    if text in _NULLS:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _INTEGER.fullmatch(text) and len(text) <= _INTEGER_CHARS:
        return int(text, 0)
    if special := _SPECIAL_FLOAT.fullmatch(text):
        return math.nan if special[2] is None else float(f"{special[1]}inf")
    if _FLOAT.fullmatch(text) and math.isfinite(value := float(text)):
        return value
    return text


def quoted(text: str) -> str:
    """Text as messages show it."""
    shown = (_ESCAPES.get(char) or (char if char.isprintable() else f"\\u{{{ord(char):x}}}") for char in text)
    return f'"{"".join(shown)}"'


def refuse(node: yaml.Node, path: str, what: str) -> NoReturn:
    """Raise ``DocumentRefusal`` for a node."""
    raise DocumentRefusal(f"{f'{path}: ' if path else ''}{what}{_place(node.start_mark)}")


def _place(mark: yaml.Mark | None) -> str:
    # Dynamo tells no place for the very beginning.
    return f" at line {mark.line + 1} column {mark.column + 1}" if mark and (mark.line or mark.column) else ""


def _describe(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "sequence"
    if isinstance(node, yaml.MappingNode):
        return "map"
    value = scalar_value(node)
    if value is None:
        return "unit value"
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, int):
        return f"integer `{value}`" + (" as u128" if value >= _U64_LIMIT else "")
    return f"floating point `{value!r}`" if isinstance(value, float) else f"string {quoted(str(value))}"

"""Which log messages are shown: ``DYN_LOG`` as Dynamo has it, a level and levels of their own for some targets.

``info,dynamo_es.router=debug,aiokafka=off``: a bare level holds for everything, ``target=level`` for the loggers whose
name begins with the target; the longest target that fits wins. Names may be Rust's (``a::b`` is ``a.b``). Pure.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

OFF = logging.CRITICAL + 10
# Python has no level below DEBUG that its libraries use.
_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": OFF,
}
_TARGET = re.compile(r"[A-Za-z0-9_.-]+")
_FORM = f"LEVEL or LEVEL,TARGET=LEVEL,...; a level is one of {', '.join(_LEVELS)}"


@dataclass(frozen=True, slots=True)
class LogFilter:
    """``default``: least level (of module ``logging``) that is shown; ``targets``: prefix and level, longest first."""

    default: int
    targets: tuple[tuple[str, int], ...] = ()

    @property
    def lowest(self) -> int:
        """No message below this is shown, whoever says it."""
        return min(self.default, *(level for _, level in self.targets)) if self.targets else self.default

    def level_of(self, name: str) -> int:
        """Least level that is shown of the logger ``name``."""
        return next((level for target, level in self.targets if name.startswith(target)), self.default)

    def admits(self, record: logging.LogRecord) -> bool:
        """Whether a message is shown; a filter for a handler."""
        return record.levelno >= self.level_of(record.name)


def parse_log_filter(text: str) -> LogFilter:
    """The filter that ``text`` describes; ``info`` where it names no bare level, and empty parts mean nothing.

    A target without a level is refused: Rust's filter takes a misspelt level for one, and shows nothing at all.

    Raises:
        ValueError: Names the part that is wrong, and what is accepted.
    """
    default = logging.INFO
    targets: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        target, equals, word = (piece.strip() for piece in part.rpartition("="))
        level = _LEVELS.get(word.lower())
        if level is None:
            raise ValueError(f"{word!r} is no level; expected {_FORM}")
        if not equals:
            default = level
            continue
        name = target.replace("::", ".")
        if not _TARGET.fullmatch(name):
            raise ValueError(f"{target!r} is no target (spans and fields are not supported); expected {_FORM}")
        targets[name] = level
    return LogFilter(default, tuple(sorted(targets.items(), key=lambda item: (-len(item[0]), item[0]))))


def check_log_filter(text: str) -> None:
    """Raises ValueError as ``parse_log_filter``."""
    parse_log_filter(text)

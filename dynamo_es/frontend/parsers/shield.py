"""Tells marks from text that only spells them, where token ids are known. Pure.

A vocabulary has marks as special tokens; a model that writes *about* a mark spells it with ordinary ones. Parsers
read text, so ordinary text that spells a special token gets a ``BREAK`` within, which nothing matches, and which goes
when text leaves the parsers. ``BREAK`` is half a surrogate pair, which no text that was decoded from bytes contains.
"""

from __future__ import annotations

from collections.abc import Mapping

from dynamo_es.frontend.parsers.tape import Markers

BREAK = "\udbff"


class Shield:
    """Stands between one choice's detokenizer and its parsers.

    Args:
        specials: Text of the special tokens that parsers look for, by id; not empty.
    """

    __slots__ = ("_markers", "_pending", "_specials")

    def __init__(self, specials: Mapping[int, str]) -> None:
        self._specials = specials
        self._markers = Markers(*specials.values())
        self._pending = ""

    def push(self, token_id: int, text: str) -> str:
        """Text that a token completed; an ordinary one's end that may become a mark's spelling waits."""
        mark = self._specials.get(token_id)
        if mark is None or not text.endswith(mark):
            return self._broken(self._pending + text, ended=False)
        before = self._pending + text[: len(text) - len(mark)]
        return self._broken(before, ended=True) + mark

    def finish(self, text: str) -> str:
        """The last text, and what waits."""
        return self._broken(self._pending + text, ended=True)

    def _broken(self, text: str, *, ended: bool) -> str:
        parts: list[str] = []
        start = 0
        while True:
            place, marker = self._markers.find(text, start, ended=ended)
            parts.append(text[start:place])
            if marker is None:
                self._pending = text[place:]
                return "".join(parts)
            parts.append(marker[0] + BREAK + marker[1:])
            start = place + len(marker)

"""An exact cache of tokenization: text between special tokens is encoded once.

A tokenizer cuts its input at special tokens before anything else, and encodes what stands between two of them by
itself, as if nothing were around it. So the ids of a chat are the ids of its pieces: the next turn of a chat pays for
what is new in it, and a system prompt or an earlier turn that comes again costs a look-up. ``exact_cuts`` says where a
tokenizer is known to work so; for any other there is no cache.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Cuts = Sequence[Mapping[str, int]]
"""Rounds of cutting: ids by token. Each round cuts what the rounds before it left."""

_ENTRY_BYTES = 256
_TOKEN_BYTES = 8
_SHARE = 8
"""A piece larger than this part of the cache is not kept."""
_MODELS = frozenset({"BPE", "Unigram", "WordLevel", "WordPiece"})
_PIECEWISE = frozenset(
    {
        *("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Punctuation", "Split", "UnicodeScripts"),
        *("Whitespace", "WhitespaceSplit"),
    }
)
"""Pre-tokenizers that see a piece only, and nothing of where in the text it stands."""


class CacheTally:
    """What the tokenizations of one model found in caches, over all of its loads. Thread-safe.

    Attributes:
        hits, misses: Prompts whose beginning was found, and was not.
        cached_tokens, uncached_tokens: Their tokens that came from a cache, and that were made.
    """

    __slots__ = ("_lock", "cached_tokens", "hits", "misses", "uncached_tokens")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.hits = 0
        self.misses = 0
        self.cached_tokens = 0
        self.uncached_tokens = 0

    def add(self, *, hit: bool, cached: int, uncached: int) -> None:
        """Count one prompt."""
        with self._lock:
            if hit:
                self.hits += 1
            else:
                self.misses += 1
            self.cached_tokens += cached
            self.uncached_tokens += uncached


class SegmentCache:
    """Least recently used pieces, bounded by bytes. Thread-safe.

    Args:
        encode: Ids of a text, the same at each call.
        cuts: From ``exact_cuts``.
        max_bytes: Bound of text, ids (8 bytes a token) and about 256 bytes an entry.
        tally: Counts what is found.

    Attributes:
        size: Bytes in use.
    """

    def __init__(
        self, encode: Callable[[str], list[int]], cuts: Cuts, max_bytes: int, tally: CacheTally | None = None
    ) -> None:
        self._encode = encode
        self._rounds = [_Round(tokens) for tokens in cuts if tokens]
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._numbers: dict[int, int] = {}
        self._lock = threading.Lock()
        self.tally = CacheTally() if tally is None else tally
        self.size = 0

    def ids(self, text: str) -> list[int]:
        """Ids of ``text``, the same as without the cache."""
        result: list[int] = []
        cached, uncached, hit = 0, 0, None
        for piece in self._pieces(text, 0):
            if isinstance(piece, int):
                result.append(piece)
                continue
            found = self._find(piece)
            hit = found is not None if hit is None else hit
            if found is None:
                found = self._made(piece)
                uncached += len(found)
            else:
                cached += len(found)
            result += found
        if hit is not None:
            self.tally.add(hit=hit, cached=cached, uncached=uncached)
        return result

    def _pieces(self, text: str, level: int) -> Iterator[str | int]:
        """Ids of the tokens that it is cut at, and the texts between them; none is empty."""
        if level == len(self._rounds):
            if text:
                yield text
            return
        tokens, place = self._rounds[level].tokens, 0
        for match in self._rounds[level].pattern.finditer(text):
            if place < match.start():
                yield from self._pieces(text[place : match.start()], level + 1)
            yield tokens[match.group()]
            place = match.end()
        if place < len(text):
            yield from self._pieces(text[place:], level + 1)

    def _find(self, piece: str) -> tuple[int, ...] | None:
        with self._lock:
            found = self._entries.get(piece)
            if found is not None:
                self._entries.move_to_end(piece)
            return found

    def _made(self, piece: str) -> tuple[int, ...]:
        # One object a number, whichever entry it stands in: a hit copies references, and an entry has 8 bytes a token.
        number = self._numbers.setdefault
        ids = tuple([number(value, value) for value in self._encode(piece)])
        size = _size(piece, ids)
        if size > self._max_bytes // _SHARE:
            return ids
        with self._lock:
            if piece not in self._entries:
                self._entries[piece] = ids
                self.size += size
                while self.size > self._max_bytes:
                    self.size -= _size(*self._entries.popitem(last=False))
        return ids


class _Round:
    """Leftmost, longest, not overlapping: as tokenizers look for special tokens."""

    __slots__ = ("pattern", "tokens")

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.tokens = dict(tokens)
        self.pattern = re.compile("|".join(map(re.escape, sorted(self.tokens, key=len, reverse=True))))


def exact_cuts(settings: Mapping[str, Any]) -> Cuts | None:
    """Where a tokenizer cuts before it encodes, by its ``tokenizer.json``; None: its pieces may not add up.

    Tokens that are looked for before normalization cut first, and each piece is then normalized by itself; without a
    normalizer the others cut what is left. There are no cuts where something looks beyond a piece (special tokens that
    take the white space around them, Metaspace that treats the first word another way, truncation, padding), where
    the same text may get other ids (dropout), or for parts that are not known here.
    """
    added = [item for item in settings.get("added_tokens", ()) if item["content"]]
    model = settings.get("model") or {}
    if (
        any(item.get(name) for item in added for name in ("lstrip", "rstrip", "single_word"))
        or settings.get("truncation") is not None
        or settings.get("padding") is not None
        or model.get("dropout")
        or model.get("type") not in _MODELS
        or not _is_piecewise(settings.get("pre_tokenizer"))
    ):
        return None
    first = {item["content"]: item["id"] for item in added if not item.get("normalized")}
    if settings.get("normalizer") is not None:
        return (first,)
    return first, {item["content"]: item["id"] for item in added if item.get("normalized")}


def _is_piecewise(part: Any) -> bool:
    if part is None:
        return True
    kind = part.get("type")
    if kind == "Sequence":
        return all(map(_is_piecewise, part.get("pretokenizers", ())))
    if kind == "Metaspace":
        return part.get("prepend_scheme") in ("always", "never")
    return kind in _PIECEWISE


def _size(piece: str, ids: tuple[int, ...]) -> int:
    return len(piece) * (1 if piece.isascii() else 4) + _TOKEN_BYTES * len(ids) + _ENTRY_BYTES

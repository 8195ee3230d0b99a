"""Tokenizers: text to ids, and ids to text as they come. No asyncio; every object may be used from several threads.

Where a tokenizer maps each id to bytes (byte-level BPE, the built-in one) text is decoded from those bytes by an
incremental UTF-8 decoder: any split of a character over tokens is safe, and what is streamed equals what one decode
of everything gives. Elsewhere (SentencePiece with byte fallback) a window of recent ids is decoded again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from encodings.utf_8 import IncrementalDecoder
from typing import Protocol

REPLACEMENT = "�"
UNSTABLE_TOKENS = 4
"""A UTF-8 character has at most four bytes: after so many tokens without one, what is pending is no character."""


NONE_SHOWN: frozenset[int] = frozenset()


class DecodeStream(Protocol):
    """Text of one sequence of ids. Not to be shared."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is complete after these ids; bytes of an unfinished character are held back."""

    def finish(self) -> str:
        """What is held back, as one U+FFFD; empty if nothing is. The stream is over."""


class Detokenizer(Protocol):
    """Ids to text."""

    def stream(self, skip_special_tokens: bool, shown: frozenset[int] = NONE_SHOWN) -> DecodeStream:
        """A new stream. ``shown``: special ids whose text is given all the same."""


class Tokenizer(Detokenizer, Protocol):
    """One model's tokenizer. Immutable, thread-safe, never blocks on I/O."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer, from the model's generation settings."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that are hidden from text unless asked for."""

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """``bos_token``, ``eos_token``, ... for chat templates."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that a model of this tokenizer takes."""

    @property
    def max_token_chars(self) -> int | None:
        """Longest piece of text that one id can stand for; None if there is no such bound."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of ``text``; marks of special tokens inside it become those tokens."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of all ids at once; invalid bytes become U+FFFD. Unknown ids are skipped."""


class ByteTable(Protocol):
    """Bytes of ids."""

    def get(self, key: int, default: bytes, /) -> bytes:
        """Bytes of an id; ``default`` if it gives no text."""


class ShownTable:
    """A ``ByteTable`` of what is visible, and of the special ids that are shown all the same."""

    __slots__ = ("_shown", "_visible")

    def __init__(self, visible: Mapping[int, bytes], everything: Mapping[int, bytes], shown: frozenset[int]) -> None:
        self._visible = visible
        self._shown = {key: everything[key] for key in shown if key in everything}

    def get(self, key: int, default: bytes, /) -> bytes:
        found = self._shown.get(key)
        return self._visible.get(key, default) if found is None else found


class ByteDecodeStream:
    """Decodes through a table from id to bytes.

    Text of a token that ends inside a character waits for the rest of it, so that `` 😀`` arrives whole.
    """

    __slots__ = ("_decoder", "_held", "_table")

    def __init__(self, table: ByteTable) -> None:
        self._table = table
        self._decoder = IncrementalDecoder("replace")
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        get = self._table.get
        pieces = [get(token_id, b"") for token_id in token_ids]
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if not data:
            return ""
        if data.isascii() and not self._decoder.buffer:
            text, self._held = self._held + data.decode("ascii"), ""
            return text
        if data[-1] < 0x80:
            text = self._held + self._decoder.decode(data)
            self._held = ""
            return text
        return "".join(map(self._push_one, pieces))

    def finish(self) -> str:
        return self._held + self._decoder.decode(b"", True)

    def _push_one(self, piece: bytes) -> str:
        text = self._held + self._decoder.decode(piece)
        if self._decoder.getstate()[0]:
            self._held = text
            return ""
        self._held = ""
        return text


class WindowDecodeStream:
    """Decodes a window of ids twice: up to the last emitted one, and all; the difference is new text.

    Text that ends in U+FFFD is held back, for at most four tokens.

    Args:
        decode: Text of a list of ids.
        hidden: Ids that never give text; they do not enter the window.
        context: Ids before the first; their text is not given, but that of the first may depend on it.
    """

    __slots__ = ("_decode", "_hidden", "_ids", "_read")

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        hidden: frozenset[int] = frozenset(),
        context: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._hidden = hidden
        self._ids: list[int] = [token_id for token_id in context if token_id not in hidden]
        self._read = len(self._ids)

    def push(self, token_ids: Sequence[int]) -> str:
        parts: list[str] = []
        for token_id in token_ids:
            if token_id in self._hidden:
                continue
            self._ids.append(token_id)
            text = self._fresh()
            if not text:
                continue
            if text.endswith(REPLACEMENT) and len(self._ids) - self._read < UNSTABLE_TOKENS:
                continue
            parts.append(text)
            self._emitted()
        return "".join(parts)

    def finish(self) -> str:
        text = self._fresh()
        self._emitted()
        stem = text.rstrip(REPLACEMENT)
        return stem + REPLACEMENT if len(stem) < len(text) else text

    def _fresh(self) -> str:
        before = self._decode(self._ids[: self._read])
        return self._decode(self._ids)[len(before) :]

    def _emitted(self) -> None:
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)


BUILTIN_BYTES = "builtin:bytes"
_BYTES_SPECIALS = ("<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
BYTES_TEMPLATE = (
    "{% for message in messages %}"
    "{% set role = 'system' if message.role == 'developer' else 'tool' if message.role == 'function' "
    "else message.role %}"
    "<|{{ role }}|>{{ message.content }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class BytesTokenizer:
    """``builtin:bytes``: ids 0..255 are bytes, 256.. are seven marks. Needs no files; for demos and tests."""

    eos_token_ids = (257, 262)
    special_ids = frozenset(range(256, 256 + len(_BYTES_SPECIALS)))
    special_tokens: Mapping[str, str] = {"bos_token": "<s>", "eos_token": "</s>"}
    vocab_size = 256 + len(_BYTES_SPECIALS)
    max_token_chars = max(map(len, _BYTES_SPECIALS))

    def __init__(self) -> None:
        self._ids = {mark: 256 + place for place, mark in enumerate(_BYTES_SPECIALS)}
        self._split = re.compile("(" + "|".join(map(re.escape, _BYTES_SPECIALS)) + ")").split
        plain = {value: bytes((value,)) for value in range(256)}
        self._visible = plain
        self._all = plain | {token_id: mark.encode() for mark, token_id in self._ids.items()}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        result = [256] if add_special_tokens else []
        for place, part in enumerate(self._split(text)):
            if place % 2:
                result.append(self._ids[part])
            else:
                result.extend(part.encode("utf-8", "replace"))
        return result

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return _decode_bytes(token_ids, self._visible if skip_special_tokens else self._all)

    def stream(self, skip_special_tokens: bool, shown: frozenset[int] = NONE_SHOWN) -> DecodeStream:
        if skip_special_tokens and shown:
            return ByteDecodeStream(ShownTable(self._visible, self._all, shown))
        return ByteDecodeStream(self._visible if skip_special_tokens else self._all)


def _decode_bytes(token_ids: Iterable[int], table: Mapping[int, bytes]) -> str:
    return b"".join([table.get(token_id, b"") for token_id in token_ids]).decode("utf-8", "replace")


def byte_alphabet() -> dict[str, int]:
    """The letters by which byte-level BPE writes bytes (GPT-2's ``bytes_to_unicode``, reversed)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in set(plain)]
    letters = {chr(value): value for value in plain}
    return letters | {chr(256 + place): value for place, value in enumerate(others)}


def byte_table(vocab: Mapping[str, int]) -> dict[int, bytes]:
    """Bytes of every id of a byte-level vocabulary; a token with a letter outside the alphabet stands for itself."""
    alphabet = byte_alphabet()
    table: dict[int, bytes] = {}
    for token, token_id in vocab.items():
        try:
            table[token_id] = bytes([alphabet[letter] for letter in token])
        except KeyError:
            table[token_id] = token.encode()
    return table

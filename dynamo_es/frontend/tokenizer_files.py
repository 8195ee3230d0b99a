"""Loads the tokenizer and chat template of a model directory. Does I/O; call it off the event loop."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as RustTokenizer

from dynamo_es.errors import DynamoException
from dynamo_es.frontend.template import ChatRenderer
from dynamo_es.frontend.tokenizer import (
    BUILTIN_BYTES,
    BYTES_TEMPLATE,
    NONE_SHOWN,
    ByteDecodeStream,
    BytesTokenizer,
    DecodeStream,
    ShownTable,
    Tokenizer,
    WindowDecodeStream,
    byte_table,
)
from dynamo_es.frontend.tokenizer_backends import Encode, TokenizerOptions, chosen_encoder
from dynamo_es.frontend.tokenizer_cache import SegmentCache, exact_cuts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FAST_FILE = "tokenizer.json"
_LOOKED_FOR = (FAST_FILE, "tokenizer.model", "vocab.json", "tekken.json")
_BATCH_CHARS = 8192
"""From this length on the batch call without offsets is faster than ``encode``."""


class TokenizerNotFound(DynamoException):
    """A model directory without a tokenizer that can be loaded."""

    def __init__(self, directory: Path, reason: str) -> None:
        super().__init__(f"no tokenizer in {directory}: {reason}")
        self.directory = directory


class ModelFiles:
    """The small JSON files of a model directory that say how its text is made."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = _read_json(directory / "config.json")
        self.generation = _read_json(directory / "generation_config.json")
        self.tokenizer_config = _read_json(directory / "tokenizer_config.json")

    def special_tokens(self) -> dict[str, str]:
        """``bos_token`` and the like, from tokenizer_config.json and special_tokens_map.json."""
        found: dict[str, str] = {}
        for source in (_read_json(self.directory / "special_tokens_map.json"), self.tokenizer_config):
            for name, value in source.items():
                content = value.get("content") if isinstance(value, dict) else value
                if name.endswith("_token") and isinstance(content, str):
                    found[name] = content
        return found

    def eos_ids(self, id_of: Mapping[str, int]) -> tuple[int, ...]:
        """generation_config.json's ids; without it config.json's; the tokenizer's eos token is always one."""
        found: list[int] = []
        for source in (self.generation, self.config, self.config.get("text_config") or {}):
            value = source.get("eos_token_id")
            if value is not None:
                found = [value] if isinstance(value, int) else [item for item in value if isinstance(item, int)]
                break
        token = self.special_tokens().get("eos_token")
        if token is not None and token in id_of:
            found.append(id_of[token])
        return tuple(dict.fromkeys(found))

    def vocab_size(self) -> int:
        """config.json's size of the embedding, which may exceed the tokenizer's; 0 if it says nothing."""
        for source in (self.config, self.config.get("text_config") or {}):
            value = source.get("vocab_size")
            if isinstance(value, int):
                return value
        return 0

    def chat_template(self) -> str | None:
        """chat_template.jinja, or chat_template of tokenizer_config.json (text, or the list's ``default``)."""
        file = self.directory / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        listed = _read_json(self.directory / "chat_template.json").get("chat_template")
        value = self.tokenizer_config.get("chat_template", listed)
        if isinstance(value, list):
            named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
            value = named.get("default", next(iter(named.values()), None))
        return value if isinstance(value, str) else None


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` through the ``tokenizers`` library.

    Args:
        rust: The library's tokenizer.
        files: Of its model.
        options: Who encodes, and the bound of the cache of tokenized pieces; it is used where it is exact.

    Raises:
        TokenizerUnsupported: Who is to encode cannot take the model.
    """

    def __init__(self, rust: RustTokenizer, files: ModelFiles, options: TokenizerOptions | None = None) -> None:
        self._rust = rust
        used = options or TokenizerOptions()
        chosen = chosen_encoder(used, files.directory / FAST_FILE, self._by_library)
        self._encode: Encode = self._by_library if chosen is None else chosen
        vocab = rust.get_vocab(with_added_tokens=True)
        settings = json.loads(rust.to_str())
        added = settings.get("added_tokens", ())
        self.special_ids = frozenset(item["id"] for item in added if item["special"])
        self.special_tokens = files.special_tokens()
        self.eos_token_ids = files.eos_ids(vocab)
        self.vocab_size = max(files.vocab_size(), max(vocab.values(), default=-1) + 1)
        self._all: dict[int, bytes] | None = None
        self._visible: dict[int, bytes] | None = None
        self.max_token_chars: int | None = None
        cuts = exact_cuts(settings) if used.cache_bytes > 0 else None
        self.cache = None if cuts is None else SegmentCache(self._encode_plain, cuts, used.cache_bytes, used.tally)
        if not _is_byte_level(settings.get("decoder")):
            return
        self._all = byte_table(vocab)
        self._visible = {key: value for key, value in self._all.items() if key not in self.special_ids}
        if settings.get("normalizer") is None and not any(map(_is_greedy, added)):
            self.max_token_chars = max(map(len, self._all.values()))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self.cache is not None and not add_special_tokens:
            return self.cache.ids(text)
        return self._encode(text, add_special_tokens)

    def _encode_plain(self, text: str) -> list[int]:
        return self._encode(text, False)

    def _by_library(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < _BATCH_CHARS:
            return self._rust.encode(text, add_special_tokens=add_special_tokens).ids
        return self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._rust.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def stream(self, skip_special_tokens: bool, shown: frozenset[int] = NONE_SHOWN) -> DecodeStream:
        table = self._visible if skip_special_tokens else self._all
        if table is not None and self._all is not None:
            return ByteDecodeStream(ShownTable(table, self._all, shown) if shown else table)
        return _window_stream(self, skip_special_tokens, shown)


class TransformersTokenizer:
    """A tokenizer that only ``transformers`` can load; slower, and used under a lock as it keeps state."""

    def __init__(self, slow: PreTrainedTokenizerBase, files: ModelFiles) -> None:
        self._slow = slow
        self._lock = threading.Lock()
        vocab = slow.get_vocab()
        self.special_ids = frozenset(slow.all_special_ids)
        self.special_tokens = files.special_tokens()
        self.eos_token_ids = files.eos_ids(vocab)
        self.vocab_size = max(files.vocab_size(), len(slow))
        self.max_token_chars: int | None = None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with self._lock:
            return list(self._slow.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        with self._lock:
            return str(self._slow.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def stream(self, skip_special_tokens: bool, shown: frozenset[int] = NONE_SHOWN) -> DecodeStream:
        return _window_stream(self, skip_special_tokens, shown)


def load_tokenizer(
    source: str, own_template: str | None = None, options: TokenizerOptions | None = None
) -> tuple[Tokenizer, ChatRenderer | None]:
    """Tokenizer and chat template of a model directory, or of ``builtin:bytes``.

    ``own_template``: text of a chat template that counts instead of the model's. ``options``: how the tokenizer is
    made.

    Raises:
        TokenizerNotFound: No directory, or no tokenizer in it; names both and the files that were looked for.
        TokenizerUnsupported: The tokenizer that the options name cannot take the model.
        TemplateError: The chat template does not compile.
    """
    used = options or TokenizerOptions()
    if source == BUILTIN_BYTES:
        chosen_encoder(used, None, None)
        builtin = BytesTokenizer()
        return builtin, ChatRenderer(own_template or BYTES_TEMPLATE, builtin.special_tokens)
    directory = Path(source)
    if not directory.is_dir():
        raise TokenizerNotFound(directory, "it is not a directory; set --model-path to a local copy of the model")
    files = ModelFiles(directory)
    tokenizer = _load(directory, files, used)
    template = own_template if own_template is not None else files.chat_template()
    return tokenizer, None if template is None else ChatRenderer(template, tokenizer.special_tokens)


def _load(directory: Path, files: ModelFiles, options: TokenizerOptions) -> Tokenizer:
    fast = directory / FAST_FILE
    if fast.is_file():
        try:
            rust = RustTokenizer.from_file(str(fast))
        except Exception as error:  # the library raises nothing more specific for a bad file
            raise TokenizerNotFound(directory, f"tokenizer.json cannot be read ({error})") from error
        return HuggingFaceTokenizer(rust, files, options)
    if not any((directory / name).is_file() for name in _LOOKED_FOR):
        raise TokenizerNotFound(directory, f"looked for {', '.join(_LOOKED_FOR)}")
    chosen_encoder(options, None, None)
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise TokenizerNotFound(directory, f"transformers cannot load it ({error})") from error
    return TransformersTokenizer(slow, files)


def _window_stream(tokenizer: Tokenizer, skip_special_tokens: bool, shown: frozenset[int]) -> DecodeStream:
    hidden = tokenizer.special_ids - shown if skip_special_tokens else NONE_SHOWN
    skip = skip_special_tokens and not shown
    return WindowDecodeStream(lambda ids: tokenizer.decode(ids, skip), hidden)


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders", ())
        return len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"


def _is_greedy(added_token: Mapping[str, Any]) -> bool:
    return any(added_token.get(name) for name in ("lstrip", "rstrip", "single_word"))


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerNotFound(file.parent, f"{file.name} is not JSON ({error})") from error
    return value if isinstance(value, dict) else {}

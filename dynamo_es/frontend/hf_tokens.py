"""Hugging Face's tokenizers as what the output pipeline needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamo_es.frontend.tokenizer import NONE_SHOWN, UNSTABLE_TOKENS, DecodeStream, WindowDecodeStream


class HuggingFaceDetokenizer:
    """A ``Detokenizer`` over a tokenizer of the ``transformers`` library.

    Args:
        tokenizer: Whose ``decode`` is used.
        hidden: Ids that never give text.
        prompt: Ids before the output; text of its first token depends on the last of them.
        shows_special: Special tokens give text whatever a request says: parsers need to see them.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        hidden: frozenset[int] = NONE_SHOWN,
        prompt: Sequence[int] = (),
        shows_special: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._context = tuple(prompt[-UNSTABLE_TOKENS:])
        self._shows_special = shows_special

    def stream(self, skip_special_tokens: bool, shown: frozenset[int] = NONE_SHOWN) -> DecodeStream:
        skips = skip_special_tokens and not self._shows_special
        decode = self._tokenizer.decode
        return WindowDecodeStream(
            lambda ids: str(decode(list(ids), skip_special_tokens=skips)), self._hidden - shown, self._context
        )

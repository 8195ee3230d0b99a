"""A part of a real tokenizer, which loads in a moment."""

from __future__ import annotations

import json
from typing import Any

from tests.unit.frontend.conftest import MODEL_DIR

WORDS = 1000


def small_tokenizer() -> dict[str, Any]:
    """``tokenizer.json`` of the model in tests/data with its first 1,000 tokens only; their ids stay."""
    made: dict[str, Any] = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    model = made["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < WORDS}
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    known = model["vocab"]
    model["merges"] = [pair for pair in pairs if pair[0] in known and pair[1] in known and "".join(pair) in known]
    return made

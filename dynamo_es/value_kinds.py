"""What kind of value it is, in the words that Dynamo's messages have for it (those of Rust's serde)."""

from __future__ import annotations

from typing import Any


def scalar_kind(value: Any) -> str | None:
    """``boolean `true```, ``integer `1```, ``floating point `0.5```; None: it is none of these."""
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, int):
        return f"integer `{value}`"
    return f"floating point `{value}`" if isinstance(value, float) else None

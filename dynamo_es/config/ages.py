"""Ages that people type: ``90min``, ``24h``, ``7d``."""

from __future__ import annotations

import re

AGE_FORM = "a number of min, h or d"
_AGE = re.compile(r"([0-9]{1,9})(min|h|d)")
_UNITS_MS = {"min": 60_000, "h": 3_600_000, "d": 86_400_000}
# Nothing is kept for longer than a career.
_MAX_DAYS = 36_500


def parse_age_ms(text: str) -> int:
    """Age in ms. Raises ValueError that says what is expected."""
    found = _AGE.fullmatch(text)
    if found is None:
        raise ValueError(f"expected {AGE_FORM}: 24h")
    age_ms = int(found[1]) * _UNITS_MS[found[2]]
    if not 0 < age_ms <= _MAX_DAYS * _UNITS_MS["d"]:
        raise ValueError(f"{text}: must be between 1min and {_MAX_DAYS}d")
    return age_ms

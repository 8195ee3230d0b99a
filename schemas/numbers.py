"""Numbers with bounds, checked when a value is decoded."""

from __future__ import annotations

from typing import Annotated

import msgspec

Unsigned = Annotated[int, msgspec.Meta(ge=0)]
"""0 or more: ids, counts, offsets. At most 2^64 - 1, which is all that msgpack carries."""

Positive = Annotated[int, msgspec.Meta(ge=1)]
"""1 or more: sizes."""

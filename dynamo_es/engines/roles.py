"""The stages that a worker may stand for, and what follows from them: its endpoint, and whom it needs. Pure data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

DEFAULT_ENDPOINTS: Mapping[str, str] = {
    "aggregated": "dynamo.backend.generate",
    "prefill": "dynamo.prefill.generate",
    "decode": "dynamo.backend.generate",
}
"""Dynamo's, by stage."""
NEEDS: Mapping[str, Sequence[Sequence[str]]] = {"aggregated": [], "prefill": [["decode"]], "decode": [["prefill"]]}
"""``needs`` of the card, by stage."""

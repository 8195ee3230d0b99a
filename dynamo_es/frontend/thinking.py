"""Whether a model thinks unless a request says otherwise (``dynamo.frontend.thinking``). Pure."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

_MODES = {"enabled": True, "disabled": False}
_SAID = ("thinking", "enable_thinking", "thinking_mode", "reasoning_effort")


def runtime_default_thinking_mode(runtime_config: Any) -> str | None:
    """``runtime_data.default_thinking_mode`` of a model card's runtime config; None unless it is a text."""
    data = runtime_config.get("runtime_data") if isinstance(runtime_config, Mapping) else None
    mode = data.get("default_thinking_mode") if isinstance(data, Mapping) else None
    return mode if isinstance(mode, str) and mode else None


def apply_default_thinking_mode_to_template_kwargs(
    chat_template_kwargs: dict[str, Any], default_thinking_mode: str | None, *, request_has_root_thinking: bool = False
) -> dict[str, Any]:
    """Template variables with the thinking variables of the default mode, if the request says nothing about it.

    Args:
        chat_template_kwargs: Variables of the request; not changed.
        default_thinking_mode: ``enabled`` or ``disabled``; anything else changes nothing.
        request_has_root_thinking: The request has a ``thinking`` member of its own.
    """
    if not default_thinking_mode or request_has_root_thinking:
        return chat_template_kwargs
    if any(name in chat_template_kwargs for name in _SAID):
        return chat_template_kwargs
    thinks = _MODES.get(default_thinking_mode)
    if thinks is None:
        logger.warning("default_thinking_mode %r is neither enabled nor disabled", default_thinking_mode[:64])
        return chat_template_kwargs
    return {
        **chat_template_kwargs,
        "thinking": thinks,
        "enable_thinking": thinks,
        "thinking_mode": default_thinking_mode,
    }

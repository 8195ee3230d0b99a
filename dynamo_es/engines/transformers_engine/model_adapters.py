"""LoRA adapters over a model, with peft. Everything here belongs to the model's thread."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

from dynamo_es.errors import ConfigError, InvalidArgument
from dynamo_es.router.hashing import lora_name_to_id

MAX_RANK = 1_024
"""The room of an adapter is taken by what its configuration says, before its weights are read."""
_MAX_CONFIG_BYTES = 1024 * 1024


class ModelAdapters:
    """The adapters of one model. It computes by itself until ``activate`` is called.

    To torch an adapter is called by its id: its own name may have characters that names of modules must not have.
    """

    def __init__(self, model: Any) -> None:
        """``model``: of transformers, without adapters."""
        self._model = model
        self._active: str | None = None
        self._names: set[str] = set()

    def load(self, name: str, folder: str) -> None:
        """Put an adapter beside the others. Blocks.

        Raises:
            ConfigError: peft is not installed.
            InvalidArgument: It cannot be read, or does not fit the model; nothing of it stays.
        """
        try:
            import peft  # noqa: F401
        except ImportError as error:
            raise ConfigError("LoRA adapters need peft: pip install 'dynamo-es[transformers-engine]' peft") from error
        from safetensors import SafetensorError

        _check_config(name, folder)
        try:
            found = self._model.load_adapter(folder, adapter_name=_inner(name))
            # It counts the weights of the other adapters among those that it misses; they stay as they are.
            missing = (key for key in found.missing_keys if f".{_inner(name)}." in key)
            wrong = next(chain(missing, found.unexpected_keys, found.mismatched_keys), None)
            if wrong is not None:
                raise ValueError(f"its weights and the model's layers do not match, such as {wrong}")
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            self._remove(name)
            raise InvalidArgument(f"the adapter {name} in {folder} does not fit the model: {error}") from error
        finally:
            self._apply_active()
        self._names.add(name)

    def unload(self, name: str) -> None:
        """Drop an adapter that is loaded."""
        self._names.discard(name)
        if self._active == name:
            self._active = None
        self._remove(name)
        self._apply_active()

    def activate(self, name: str | None) -> None:
        """Compute with an adapter that is loaded from now on, or with the model alone."""
        if name != self._active:
            self._active = name
            self._apply_active()

    def _apply_active(self) -> None:
        model = self._model
        if not getattr(model, "peft_config", None):
            return
        if self._active is None:
            model.disable_adapters()
        else:
            model.enable_adapters()
            model.set_adapter(_inner(self._active))

    def _remove(self, name: str) -> None:
        if _inner(name) in (getattr(self._model, "peft_config", None) or ()):
            self._model.delete_adapter(_inner(name))


def _inner(name: str) -> str:
    return f"adapter_{lora_name_to_id(name)}"


def _check_config(name: str, folder: str) -> None:
    """Before anything is built by it. Raises ``InvalidArgument``."""
    where = Path(folder) / "adapter_config.json"
    try:
        if where.stat().st_size > _MAX_CONFIG_BYTES:
            raise ValueError(f"it is larger than {_MAX_CONFIG_BYTES} bytes")
        config = json.loads(where.read_bytes())
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            raise ValueError("its peft_type is not LORA")
        pattern = config.get("rank_pattern") or {}
        ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else [None])]
        if not all(type(rank) is int and 1 <= rank <= MAX_RANK for rank in ranks):
            raise ValueError(f"its ranks are not 1 to {MAX_RANK}")
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"the adapter {name}: {where}: {error}") from error

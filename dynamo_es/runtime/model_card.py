"""Describing a model for the registry: what its directory says, and sums of the files that must be alike everywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import blake3

from dynamo_es.errors import ConfigError
from schemas.registry import REGISTRY, ModelCard

BUILTIN_MODEL = "builtin:bytes"
BUILTIN_CONTEXT_LENGTH = 32_768
# Files that decide how text becomes tokens; workers of one model must agree on them.
_IDENTITY_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja", "config.json",
    "generation_config.json", "special_tokens_map.json",
)  # fmt: skip
_MAX_FILE_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's files say. ``context_length`` 0: unknown. ``sizes`` in bytes, of the files in ``checksums``."""

    source_path: str
    name: str
    context_length: int
    checksums: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)


def read_model_facts(source: str) -> ModelFacts:
    """Facts of a model directory or of the built-in model. Reads files.

    Raises:
        ConfigError: There is no such directory, or a file in it cannot be read.
    """
    if source == BUILTIN_MODEL:
        return ModelFacts(source, "mock-model", BUILTIN_CONTEXT_LENGTH, {})
    directory = Path(source).expanduser()
    if not directory.is_dir():
        raise ConfigError(
            f"model path {source}: there is no such directory; give a Hugging Face model directory or {BUILTIN_MODEL}"
        )
    checksums, sizes = {}, {}
    context_length = 0
    try:
        for name in _IDENTITY_FILES:
            file = directory / name
            if file.is_file() and file.stat().st_size <= _MAX_FILE_BYTES:
                data = file.read_bytes()
                checksums[name] = f"blake3:{blake3.blake3(data).hexdigest()}"
                sizes[name] = len(data)
                if name == "config.json":
                    context_length = _context_length(json.loads(data))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model path {source}: {error}") from error
    return ModelFacts(str(directory.resolve()), directory.resolve().name, context_length, checksums, sizes)


def make_card(
    facts: ModelFacts,
    endpoint: tuple[str, str, str],
    instance_id: int,
    *,
    name: str | None = None,
    block_size: int,
    runtime_config: Mapping[str, Any],
    model_type: str = "Chat | Completions",
    worker_type: str = "aggregated",
    needs: Sequence[Sequence[str]] = (),
) -> ModelCard:
    """The card that a token-input worker registers; its lease is set at registration."""
    namespace, component, path = endpoint
    return ModelCard(
        version=REGISTRY.version,
        namespace=namespace,
        component=component,
        endpoint=path,
        instance_id=instance_id,
        lease_id=0,
        suffix="",
        display_name=name or facts.name,
        source_path=facts.source_path,
        model_input="Tokens",
        model_type=model_type,
        worker_type=worker_type,
        needs=[list(alternative) for alternative in needs],
        context_length=int(runtime_config.get("context_length") or facts.context_length),
        kv_cache_block_size=block_size,
        runtime_config=dict(runtime_config),
        checksums=dict(facts.checksums),
    )


def differing_field(card: ModelCard, other: ModelCard) -> str | None:
    """Name of the first thing in which two cards describe different models; paths may differ."""
    for name in sorted({*card.checksums, *other.checksums}):
        if card.checksums.get(name) != other.checksums.get(name):
            return f"checksum of {name}"
    for name in ("model_input", "model_type", "context_length"):
        if getattr(card, name) != getattr(other, name):
            return name
    return None


def _context_length(config: Any) -> int:
    if not isinstance(config, dict):
        return 0
    nested = config.get("text_config")
    for source in (config, nested if isinstance(nested, dict) else {}):
        for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
            value = source.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0

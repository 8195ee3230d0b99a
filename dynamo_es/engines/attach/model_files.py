"""The directory with tokenizer, template and configuration of an attached server's model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from dynamo_es.engines.transformers_engine.gguf_files import cache_folder, unpacked_directory
from dynamo_es.engines.transformers_engine.sources import find_model

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def model_directory(given: str, fetch: Callable[[str], Path], env: Mapping[str, str]) -> Path:
    """Where the files are. Blocks; may take a minute.

    Args:
        given: A directory, a GGUF file, an installed package that brings one, or a name on the hub. A directory needs
            no more than the tokenizer; of a GGUF file a directory is made, once.
        fetch: Directory of a model on the hub; weights are not needed.
        env: Of the process.

    Raises:
        ConfigError: There is no such model, or its files cannot be read; says where it was looked for.
    """
    path = Path(given).expanduser()
    if any((path / name).is_file() for name in _TOKENIZERS):
        return path
    source = find_model(given, fetch)
    if source.gguf is None:
        return source.directory
    return unpacked_directory(source.directory, source.gguf, cache_folder(env))

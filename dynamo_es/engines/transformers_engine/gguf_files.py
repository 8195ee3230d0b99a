"""Tokenizer, template and configuration of a GGUF file as the files of a model directory, made once and kept.

Frontends load a model's tokenizer from the directory that its card names; of a GGUF file there is none, so it is made
beside others in a folder of this user (``DYN_ES_GGUF_CACHE``). Weights stay where they are.
"""

from __future__ import annotations

import fcntl
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import blake3

from dynamo_es.errors import ConfigError

logger = logging.getLogger(__name__)
FOLDER_VARIABLE = "DYN_ES_GGUF_CACHE"
_DONE = "tokenizer_config.json"
_SPECIAL = ("bos", "eos", "unk", "pad")


def cache_folder(env: Mapping[str, str]) -> Path:
    """Where such directories are kept."""
    given = env.get(FOLDER_VARIABLE, "").strip()
    return Path(given) if given else Path.home() / ".cache/dynamo_es/gguf"


def unpacked_directory(directory: Path, file: str, folder: Path) -> Path:
    """The model directory of a GGUF file; made if it is not there, which takes some seconds. Blocks.

    A file that changes gets another one. Processes may share the folder: one makes the directory, the others wait.

    Raises:
        ConfigError: The file cannot be read, is of a kind that transformers does not know, or the folder takes none.
    """
    import transformers

    path = directory / file
    try:
        state = path.stat()
        identity = f"{path}\0{state.st_size}\0{state.st_mtime_ns}\0{transformers.__version__}"
        target = folder / f"{path.stem}-{blake3.blake3(identity.encode()).hexdigest()[:16]}"
        if (target / _DONE).is_file():
            return target
        folder.mkdir(parents=True, exist_ok=True)
        # Workers that start together: one makes it, the others find it.
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (target / _DONE).is_file():
                return target
            _make(directory, file, target)
    except OSError as error:
        raise ConfigError(f"{path}: its tokenizer cannot be kept in {folder} ({FOLDER_VARIABLE}): {error}") from error
    logger.info("tokenizer and configuration of %s are in %s", path, target)
    return target


def _make(directory: Path, file: str, target: Path) -> None:
    """Make it beside its place and put it there as a whole."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".", ignore_cleanup_errors=True) as scratch:
        made = Path(scratch) / "model"
        _unpack(directory, file, made)
        made.rename(target)


def _unpack(directory: Path, file: str, target: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(str(directory), gguf_file=file, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(str(directory), gguf_file=file, local_files_only=True)
    except ImportError as error:
        raise ConfigError(
            f"{directory / file}: reading GGUF files needs gguf and torch: pip install "
            f"'dynamo-es[transformers-engine]' ({error})"
        ) from error
    # transformers has no class of its own for a file that it cannot read: an architecture that it does not know is
    # NotImplementedError or ValueError, a header without what it needs any of the others.
    except (ValueError, KeyError, IndexError, NotImplementedError, TypeError) as error:
        raise ConfigError(f"{directory / file}: transformers cannot read it: {error}") from error
    ids = {name: getattr(config, f"{name}_token_id", None) for name in _SPECIAL}
    _name_special_tokens(tokenizer, ids)
    tokenizer.save_pretrained(str(target))
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are not in this directory
    config.save_pretrained(str(target))
    known = {f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad") if ids[name] is not None}
    generation: Any = GenerationConfig
    generation(**known).save_pretrained(str(target))


def _name_special_tokens(tokenizer: Any, ids: Mapping[str, int | None]) -> None:
    """By the ids that the file gives; transformers goes by names, which are other tokens in some models."""
    for name, token_id in ids.items():
        if isinstance(token_id, int) and 0 <= token_id < len(tokenizer):
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token_id))

"""Where a model's files are: a directory, a GGUF file, an installed package that brings one, or a name on the hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from dynamo_es.errors import ConfigError
from dynamo_es.models.errors import ModelFetchError

GGUF_SUFFIX = ".gguf"
_PACKAGE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine. ``name``: what it is called if nobody says otherwise; ``gguf``: its file in
    ``directory``, None if the directory has its files in Hugging Face's form.
    """

    directory: Path
    name: str
    gguf: str | None = None


def find_model(
    given: str, fetch: Callable[[str], Path], packaged: Callable[[str], list[Path]] | None = None
) -> ModelSource:
    """The model that ``given`` names. Blocks.

    Args:
        given: A path or a name.
        fetch: Directory of a model on the hub.
        packaged: GGUF files of an installed package; None: as ``packaged_files``.

    Raises:
        ConfigError: There is no such model; says where it was looked for.
    """
    path = Path(given).expanduser()
    if path.is_file():
        return _of_file(path)
    if path.is_dir():
        return _of_directory(path)
    files = (packaged or packaged_files)(given) if _PACKAGE.fullmatch(given) else []
    if len(files) == 1:
        return _of_file(files[0], given)
    if files:
        raise ConfigError(
            f"--model {given}: the package has several GGUF files; give one of {', '.join(map(str, files))}"
        )
    if path.is_absolute() or given.startswith((".", "~")) or given.endswith(GGUF_SUFFIX):
        raise ConfigError(f"--model {given}: there is no such directory or GGUF file")
    try:
        return _of_directory(fetch(given), given)
    except ModelFetchError as error:
        raise ConfigError(
            f"--model {given}: it is no directory, no {GGUF_SUFFIX} file, no installed package with one, "
            f"and the hub did not give it: {error}"
        ) from error


def packaged_files(name: str) -> list[Path]:
    """GGUF files of an installed Python package; none if there is no such package."""
    try:
        files = metadata.files(name)
    except metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())) for file in files or () if file.suffix == GGUF_SUFFIX]


def _of_file(path: Path, name: str | None = None) -> ModelSource:
    if path.suffix != GGUF_SUFFIX:
        raise ConfigError(f"--model {path}: expected a directory or a file that ends in {GGUF_SUFFIX}")
    path = path.resolve()
    return ModelSource(path.parent, name or path.stem, path.name)


def _of_directory(path: Path, name: str | None = None) -> ModelSource:
    path = path.resolve()
    if (path / "config.json").is_file():
        return ModelSource(path, name or path.name)
    files = sorted(path.glob(f"*{GGUF_SUFFIX}"))
    if len(files) == 1:
        return ModelSource(path, name or path.name, files[0].name)
    what = f"neither config.json nor a {GGUF_SUFFIX} file"
    if files:
        what = f"several {GGUF_SUFFIX} files; give one of them"
    raise ConfigError(f"--model {path}: the directory has {what}")

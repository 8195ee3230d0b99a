"""Files that the mock engine is given: a trace with outputs, a profile with times."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from dynamo_es.engines.mock.aic_timing import AicTiming
from dynamo_es.engines.mock.args import AIC_FAILED, MockEngineArgs
from dynamo_es.engines.mock.output import RecordedOutputs, read_outputs
from dynamo_es.engines.mock.profile import ProfiledTiming, make_profile
from dynamo_es.engines.scheduling.timing import TimingModel
from dynamo_es.errors import ConfigError
from dynamo_es.router.aic_model import load_aic_engine

MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_TRACE_BYTES = 2 * 1024**3
MAX_ARGUMENTS_BYTES = 1024 * 1024
MAX_PROFILE_BYTES = 64 * 1024 * 1024
_PROFILE = ("prefill_isl", "prefill_ttft_ms", "decode_active_kv_tokens", "decode_context_length", "decode_itl")


def read_arguments(path: str) -> str:
    """The JSON text of a file of at most 1 MiB. Blocks. Raises ``ConfigError``."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_ARGUMENTS_BYTES + 1)
        if len(data) > MAX_ARGUMENTS_BYTES:
            raise ConfigError(f"--extra-engine-args {path}: it is larger than {MAX_ARGUMENTS_BYTES} bytes")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        # Dynamo's text.
        raise ConfigError(f'Failed to load mocker args from "{path}": {error}') from error


def load_outputs(path: str) -> RecordedOutputs:
    """The outputs of a trace of at most 2 GiB, with lines of at most 16 MiB. Blocks.

    Raises:
        ConfigError: It cannot be read, or is no trace.
    """
    try:
        with Path(path).open("rb") as file:
            return read_outputs(_lines(file, path), path)
    except OSError as error:
        raise ConfigError(f"--response-replay-trace-path {path}: {error.strerror or error}") from error


def load_timing(args: MockEngineArgs, model_path: str) -> TimingModel | None:
    """The times that an engine is given; None: Dynamo's polynomials. Blocks.

    Raises:
        ConfigError: The profile cannot be read, or AIC has no times for the deployment.
    """
    aic = args.aic_config(model_path)
    if aic is not None:
        try:
            return AicTiming(load_aic_engine(aic))
        except ConfigError as error:
            raise ConfigError(f"{AIC_FAILED}: {error}") from error
    return load_profile(args.planner_profile_data) if args.planner_profile_data else None


def load_profile(path: str) -> ProfiledTiming:
    """The times in a NumPy archive (``.npz``) of at most 64 MiB. Blocks.

    Raises:
        ConfigError: It cannot be read, or is no profile.
    """
    # Dynamo's text.
    failed = f'Failed to load planner_profile_data from "{path}"'
    try:
        if Path(path).stat().st_size > MAX_PROFILE_BYTES:
            raise ConfigError(f"{failed}: it is larger than {MAX_PROFILE_BYTES} bytes")
        with Path(path).open("rb") as file:
            _check_unpacked(file, failed)
            # Pickled objects would be code of whoever made the file.
            with np.load(file, allow_pickle=False) as archive:
                found = {name: np.asarray(archive[name], np.float64) for name in _PROFILE if name in archive}
    except OSError as error:
        raise ConfigError(f'{failed}: Failed to open NPZ file: "{path}"') from error
    except (ValueError, TypeError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{failed}: it is no archive of NumPy arrays of numbers ({error})") from error
    try:
        return make_profile(found)
    except ConfigError as error:
        raise ConfigError(f"{failed}: {error}") from error


def _check_unpacked(file: BinaryIO, failed: str) -> None:
    with zipfile.ZipFile(file) as archive:
        if sum(item.file_size for item in archive.infolist()) > MAX_PROFILE_BYTES:
            raise ConfigError(f"{failed}: it unpacks to more than {MAX_PROFILE_BYTES} bytes")
    file.seek(0)


def _lines(file: BinaryIO, path: str) -> Iterator[bytes]:
    read = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        read += len(line)
        if len(line) > MAX_LINE_BYTES or read > MAX_TRACE_BYTES:
            raise ConfigError(f"{path} is too large: at most {MAX_TRACE_BYTES} bytes, {MAX_LINE_BYTES} a line")
        yield line

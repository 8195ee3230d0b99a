"""What ``worker attach --model-path`` takes, without a hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_es.config.attach_options import AttachConfig
from dynamo_es.config.tree import WorkerConfig
from dynamo_es.engines.attach.model_files import model_directory
from dynamo_es.engines.attach.worker import load_material
from dynamo_es.errors import ConfigError
from dynamo_es.models.errors import ModelFetchError

SMALL = Path(__file__).parents[3] / "data" / "models" / "smollm2-135m-instruct"


def no_hub(name: str) -> Path:
    raise ModelFetchError(name, "main", "no network")


def found(given: object, env: dict[str, str] | None = None) -> Path:
    return model_directory(str(given), no_hub, env or {})


def test_a_directory_needs_no_more_than_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "weights.gguf").write_bytes(b"")
    assert found(tmp_path) == tmp_path


def test_a_name_on_the_hub_is_fetched_without_weights() -> None:
    asked: list[str] = []

    def fetch(name: str) -> Path:
        asked.append(name)
        return SMALL

    material = load_material(WorkerConfig(model_path="org/small"), AttachConfig(), {}, fetch)
    assert asked == ["org/small"]
    assert material.facts.source_path == str(SMALL.resolve())
    assert material.encode is not None
    assert material.encode("Hello, World!") == [19556, 28, 2260, 17]  # as llama.cpp's /tokenize has it


def test_what_is_nowhere_is_told_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model org/small: .* hub did not give it: .*no network"):
        found("org/small")
    with pytest.raises(ConfigError, match="no such directory or GGUF file"):
        found(tmp_path / "missing.gguf")
    with pytest.raises(ConfigError, match=r"neither config.json nor a .gguf file"):
        found(tmp_path)


def test_a_gguf_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Making the directory is the Transformers engine's, and tested there."""
    file = tmp_path / "small.gguf"
    file.write_bytes(b"GGUF")
    env = {"DYN_ES_GGUF_CACHE": str(tmp_path / "cache")}
    with pytest.raises(ConfigError, match=r"small\.gguf: "):
        found(file, env)


def test_text_input_reads_no_files() -> None:
    for worker, attach in (
        (WorkerConfig(), AttachConfig()),
        (WorkerConfig(model_path="/nowhere"), AttachConfig(input="text")),
    ):
        assert load_material(worker, attach, {}, no_hub).encode is None
    assert load_material(WorkerConfig(), AttachConfig(input="tokens"), {}, no_hub).encode is not None

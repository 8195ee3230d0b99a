"""Where the Transformers engine finds models, and what it makes of its options; without torch."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest

from dynamo_es.config.transformers_options import TransformersConfig, check_lora
from dynamo_es.engines.transformers_engine.assembly import (
    blocks_that_fit,
    context_of,
    load_material,
    sampling_defaults,
)
from dynamo_es.engines.transformers_engine.gguf_files import cache_folder
from dynamo_es.engines.transformers_engine.sources import ModelSource, find_model, packaged_files
from dynamo_es.engines.transformers_engine.worker import fetch_adapters
from dynamo_es.errors import ConfigError
from dynamo_es.models.errors import ModelFetchError


def no_hub(name: str) -> Path:
    raise ModelFetchError(name, "main", "no network")


def find(given, files=(), fetch=no_hub):
    return find_model(str(given), fetch, lambda name: list(files))


def test_a_model_is_a_directory_a_file_a_package_or_a_name(tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert find(folder) == ModelSource(folder, "llama")
    file = tmp_path / "small.Q4.gguf"
    file.write_bytes(b"GGUF")
    assert find(file) == ModelSource(tmp_path, "small.Q4", "small.Q4.gguf")
    assert find(tmp_path) == ModelSource(tmp_path, tmp_path.name, "small.Q4.gguf")
    assert find("llm-small", [file]) == ModelSource(tmp_path, "llm-small", "small.Q4.gguf")
    assert find("org/llama", fetch=lambda name: folder) == ModelSource(folder, "org/llama")
    assert packaged_files("no-such-package-at-all") == []


def test_a_model_that_is_nowhere_is_told_where_it_was_looked_for(tmp_path):
    files = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    with pytest.raises(ConfigError, match=r"--model nowhere: .* no installed package .* hub .* no network"):
        find("nowhere")
    with pytest.raises(ConfigError, match="several GGUF files"):
        find("two", files)
    with pytest.raises(ConfigError, match="no such directory or GGUF file"):
        find(tmp_path / "missing")
    with pytest.raises(ConfigError, match="no such directory or GGUF file"):
        find("missing.gguf")
    with pytest.raises(ConfigError, match=r"neither config.json nor a .gguf file"):
        find(tmp_path)
    for file in files:
        file.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"several .gguf files"):
        find(tmp_path)
    text = tmp_path / "model.txt"
    text.write_text("")
    with pytest.raises(ConfigError, match=r"expected a directory or a file that ends in .gguf"):
        find(text)


def test_the_pool_has_the_blocks_that_its_memory_gives():
    assert blocks_that_fit(1000, 100, None) == 10
    assert blocks_that_fit(1000, 100, 3) == 3
    with pytest.raises(ConfigError, match="--kv-cache-bytes=99: one block of this model takes 100"):
        blocks_that_fit(99, 100, None)


def test_the_context_is_the_models_or_less(caplog):
    assert context_of(8192, None, None) == 8192
    assert context_of(8192, None, 100) == 100
    assert context_of(0, None, 100) == 100
    with pytest.raises(ConfigError, match="--max-model-len=9000: the model's context is 8192 tokens"):
        context_of(8192, None, 9000)
    with pytest.raises(ConfigError, match="--max-model-len is missing"):
        context_of(0, None, None)
    with caplog.at_level(logging.WARNING):
        assert context_of(8192, 4096, None) == 4096
    assert "window" in caplog.text


def test_sampling_follows_the_models_configuration_where_it_has_any():
    assert sampling_defaults(
        {"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": 2, "top_p": None}
    ) == {
        "temperature": 0.6,
        "top_k": 20,
    }


def test_gguf_files_are_unpacked_where_the_user_says():
    assert cache_folder({"DYN_ES_GGUF_CACHE": "/x"}) == Path("/x")
    assert cache_folder({}).parts[-2:] == ("dynamo_es", "gguf")


@pytest.mark.parametrize("text", ["poet", "=file:///x", "poet=", "a b=file:///x"])
def test_an_adapter_is_given_as_name_and_uri(text):
    check_lora("poet=file:///x")
    with pytest.raises(ValueError, match="NAME=URI"):
        check_lora(text)


async def test_adapters_that_cannot_be_had_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--lora poet: .*Local LoRA not found"):
        await fetch_adapters((f"poet=file://{tmp_path}/none",))
    with pytest.raises(ConfigError, match=r"--lora poet: .* adapter_config.json"):
        await fetch_adapters((f"poet=file://{tmp_path}",))
    with pytest.raises(ConfigError, match="--lora //: a name must not be slashes alone"):
        await fetch_adapters((f"//=file://{tmp_path}",))


def test_without_a_model_or_without_torch_it_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match="--model is missing"):
        load_material("builtin:bytes", TransformersConfig(), {}, {})
    if importlib.util.find_spec("torch") is None:
        with pytest.raises(ConfigError, match=r"pip install 'dynamo-es\[transformers-engine\]'"):
            load_material(str(tmp_path), TransformersConfig(), {}, {})

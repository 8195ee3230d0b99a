"""Which chat processor the options ask for, what they cannot ask for, and what is missing."""

from __future__ import annotations

from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dynamo_es.config.processor_options import ChatProcessorConfig
from dynamo_es.errors import ConfigError
from dynamo_es.frontend import chat_processors, extras
from dynamo_es.frontend.chat_processors import ProcessorSettings
from dynamo_es.frontend.frontend_args import FrontendConfig
from dynamo_es.frontend.main import setup_engine_factory, setup_sglang_engine_factory
from dynamo_es.frontend.processor_factory import ModelFolder, checked_template, stream_interval, warmed_up_pool
from dynamo_es.frontend.sglang_processor import SglangEngineFactory
from dynamo_es.frontend.vllm_processor import EngineFactory, check_logprobs
from dynamo_es.http_error import HttpError
from dynamo_es.models.deployment_card import ModelDeploymentCard
from tests.unit.frontend.fakes import ScriptedEngine, card, says


@pytest.fixture
def without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, *_: Any) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(chat_processors, "find_spec", lambda name: None)
    monkeypatch.setattr(extras.importlib, "import_module", missing)


def made(executor: ThreadPoolExecutor, settings: ProcessorSettings | None = None, **options: Any) -> Any:
    config = ChatProcessorConfig(**options)
    return chat_processors.chat_processors(config, settings or ProcessorSettings(), executor, lambda: 0.0)


def test_by_default_there_is_none(executor: ThreadPoolExecutor) -> None:
    assert made(executor) is None


@pytest.mark.usefixtures("without_libraries")
@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_missing_extra_is_named(executor: ThreadPoolExecutor, name: str) -> None:
    with pytest.raises(extras.MissingExtra, match=f"dynamo-es\\[{name}\\]") as raised:
        made(executor, chat_processor=name)
    assert raised.value.extra == name


@pytest.mark.usefixtures("without_libraries")
async def test_the_factories_name_it_when_a_model_comes(tmp_path: Path) -> None:
    """They can be made without the library, as in Dynamo."""
    described = ModelDeploymentCard.of(card(source_path=str(tmp_path)))
    for factory in (
        setup_engine_factory(ProcessorSettings(), Namespace()),
        setup_sglang_engine_factory(FrontendConfig(), Namespace(tool_call_parser="hermes")),
    ):
        with pytest.raises(extras.MissingExtra):
            await factory.build_processor(described, ScriptedEngine(says()))


def test_the_factories_take_dynamos_configuration() -> None:
    assert isinstance(setup_engine_factory(FrontendConfig(), Namespace()), EngineFactory)
    assert isinstance(setup_sglang_engine_factory(FrontendConfig()), SglangEngineFactory)


@pytest.mark.parametrize(
    ("options", "workers", "part"),
    [
        ({"tool_call_parser": "hermes"}, 0, "--tool-call-parser needs --dyn-chat-processor"),
        ({"chat_processor": "vllm", "chat_template": "x.jinja"}, 0, "--chat-template is for"),
        ({"chat_processor": "vllm"}, 1, "--dyn-preprocess-workers is not for"),
        ({"chat_processor": "sglang", "chat_template": "no/such.jinja"}, 0, "must be an existing .jinja file"),
    ],
)
def test_what_does_not_go_together(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], workers: int, part: str
) -> None:
    monkeypatch.setattr(chat_processors, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=part):
        made(executor, ProcessorSettings(preprocess_workers=workers), **options)


def test_sglangs_template_file(tmp_path: Path) -> None:
    file = tmp_path / "x.jinja"
    file.write_text("\na\\nb\n")
    assert checked_template(str(file)) == "a\nb"


def test_a_model_needs_its_files_and_chat(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="serves no chat"):
        ModelFolder(ModelDeploymentCard.of(card(model_type="Completions", source_path=str(tmp_path))))
    with pytest.raises(RuntimeError, match="is no directory here"):
        ModelFolder(ModelDeploymentCard.of(card(source_path="no/such")))
    found = ModelFolder(
        ModelDeploymentCard.of(card(source_path="no/such", runtime_config={"tool_call_parser": " hermes "})),
        str(tmp_path),
    )
    assert (found.path, found.named("tool_call_parser"), found.named("reasoning_parser")) == (
        str(tmp_path), "hermes", None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("told", "runtime", "interval"),
    [
        ("", {}, 20), ("5", {}, 5), ("5", {"runtime_data": {"stream_interval": 3}}, 5),
        ("", {"runtime_data": {"stream_interval": 3}}, 3), ("", {"runtime_data": {"stream_interval": 0}}, 20),
        ("", {"runtime_data": {"stream_interval": True}}, 20), ("0", {}, 20), ("x", {}, 20),
    ],
)  # fmt: skip
def test_stream_interval(told: str, runtime: dict[str, Any], interval: int) -> None:
    assert stream_interval("DYN_X", runtime, {"DYN_X": told}) == interval


async def test_preprocess_workers_are_up_when_they_are_handed_over() -> None:
    pool = await warmed_up_pool(1)
    pool.shutdown()


@pytest.mark.parametrize(
    "request_", [{"logprobs": 3}, {"logprobs": True, "top_logprobs": -1}, {"top_logprobs": 1}, {"top_logprobs": True}]
)
def test_log_probabilities_that_vllm_cannot_give(request_: dict[str, Any]) -> None:
    with pytest.raises(HttpError, match="Validation: ") as raised:
        check_logprobs(request_)
    assert raised.value.code == 400

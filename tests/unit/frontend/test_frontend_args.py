"""Dynamo's command line of the frontend, as Dynamo's was recorded, and what it comes to here."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamo_es.cli.launch import CONFIGS, read_launch
from dynamo_es.clock import SystemClock
from dynamo_es.config.options import options_of
from dynamo_es.errors import ConfigError
from dynamo_es.frontend.dynamo_main import translated
from dynamo_es.frontend.frontend_arg_table import ARGUMENTS
from dynamo_es.frontend.frontend_args import (
    FrontendArgGroup,
    FrontendConfig,
    validate_model_name,
    validate_model_path,
)
from dynamo_es.frontend.main import graceful_shutdown, parse_args, processors_of
from dynamo_es.frontend.preprocess_pool import PreprocessPool
from dynamo_es.http_error import HttpError
from tests.unit.frontend.golden_replay import DATA

FUNCTIONS: Mapping[str, Any] = json.loads((DATA / "golden" / "frontend" / "functions.json").read_text())
LONG = re.compile(r'(\d+) x "x"')
# In Dynamo, and not in this version; each is refused by name.
ABSENT = {
    "--enable-session-prefix-index": "experimental in Dynamo, and not observed",
}


def cases(name: str) -> list[Any]:
    return [pytest.param(case, id=str(case["input"])[:80]) for case in FUNCTIONS[name]["cases"]]


def parsed(arguments: list[str], env: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in list(os.environ):
        if name.startswith(("DYN_", "NATS_")):
            monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["frontend", *arguments])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return parse_args()


def without_quotes(text: str) -> str:
    """Newer versions of Python list choices without them."""
    return " ".join(text.replace("'", "").split())


def outcome(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What a call returns, and what it raises."""
    try:
        return call(), None
    except (Exception, SystemExit) as error:
        return None, error


def told(error: BaseException | None) -> tuple[str, str] | None:
    return None if error is None else (type(error).__name__, str(error))


def recorded_error(case: Mapping[str, Any]) -> tuple[str, str] | None:
    return (case["raises"], case["message"]) if "raises" in case else None


@pytest.mark.parametrize("case", cases("parse_args / FrontendConfig.validate"))
def test_arguments_are_parsed_as_by_dynamo(
    case: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = case["input"]
    result, error = outcome(lambda: parsed(given["argv"], given["env"], monkeypatch))
    if isinstance(error, SystemExit):
        said = capsys.readouterr().err.partition("error: ")
        shown = f"SystemExit({error.code}) {said[1]}{said[2]}"
        assert (case["raises"], without_quotes(case["message"])) == ("RuntimeError", without_quotes(shown))
        return
    assert told(error) == recorded_error(case)
    if error is None:
        config, vllm_flags, sglang_flags = result
        assert vllm_flags is None
        assert case["output"] == {
            "ok": True,
            "router_mode": config.router_mode,
            "chat_processor": config.chat_processor,
            "sglang_flags": None if sglang_flags is None else vars(sglang_flags),
        }


@pytest.mark.parametrize("case", cases("validate_model_name"))
def test_model_name(case: Mapping[str, Any]) -> None:
    name, error = outcome(lambda: validate_model_name(case["input"]["value"]))
    assert (name, told(error)) == (case.get("output"), recorded_error(case))


@pytest.mark.parametrize("case", cases("validate_model_path"))
def test_model_path(case: Mapping[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "f.txt"
    file.write_text("x")
    places = {"<existing directory>": str(tmp_path), "<existing regular file f.txt>": str(file)}
    value = places.get(case["input"]["value"], case["input"]["value"])
    path, error = outcome(lambda: validate_model_path(value))
    assert (path == value) == case.get("output", False)
    expected = recorded_error(case)
    assert told(error) == (expected and (expected[0], expected[1].replace("<that path>", value)))


@pytest.mark.parametrize("case", cases("HttpError(...)"))
def test_http_error(case: Mapping[str, Any]) -> None:
    message = case["input"]["message"]
    if isinstance(message, str) and (long := LONG.fullmatch(message)):
        message = "x" * int(long[1])
    made, error = outcome(lambda: HttpError(case["input"]["code"], message))
    assert told(error) == recorded_error(case)
    if error is None:
        shown = {"code": made.code, "message_len": len(made.message), "str": str(made)[:40], "tail": made.message[-5:]}
        assert shown == case["output"]


def test_deprecated_arguments_are_warned_about() -> None:
    with pytest.warns(FutureWarning, match="--router-temperature is deprecated"):
        FrontendConfig.from_cli_args(argparse.Namespace(router_temperature=0.5))


def test_flags_replace_what_the_variable_lists() -> None:
    parser = argparse.ArgumentParser()
    FrontendArgGroup({"DYN_FRONTEND_ROUTE_EXTENSIONS": "a b"}).add_arguments(parser)
    assert parser.parse_args([]).frontend_route_extensions == ["a", "b"]
    flags = ["--frontend-route-extension", "c", "--frontend-route-extension", "d"]
    assert parser.parse_args(flags).frontend_route_extensions == ["c", "d"]


async def test_graceful_shutdown_ends_the_runtime() -> None:
    class Runtime:
        ended = False

        def shutdown(self) -> None:
            self.ended = True

    runtime = Runtime()
    await graceful_shutdown(runtime)
    assert runtime.ended


# -- what they come to -------------------------------------------------------------------------------------------------

FLAGS = {flag for config in CONFIGS for item in options_of(config) for flag in (item.spec.flag, *item.spec.aliases)}


def test_every_argument_of_dynamo_is_an_option_here_or_is_refused_by_name() -> None:
    missing = {argument.flags[0] for argument in ARGUMENTS} - FLAGS
    assert missing <= set(ABSENT)
    assert "--enable-session-prefix-index" in missing
    for flag in missing:
        argument = next(one for one in ARGUMENTS if one.flags[0] == flag)
        with pytest.raises(ConfigError, match=f"{flag} .* is not in this version"):
            translated(FrontendConfig(**{argument.dest: "other"}))


def test_variables_are_the_same() -> None:
    here = {item.spec.flag: item.spec.env for config in CONFIGS for item in options_of(config)}
    assert {one.flags[0]: one.env for one in ARGUMENTS if one.flags[0] not in ABSENT}.items() <= here.items()


def test_arguments_become_options(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [
        *("--http-port", "0", "--load-aware", "--no-kv-events", "--router-temperature", "0.5", "--namespace", "blue"),
        *("--active-prefill-tokens-threshold", "77", "--frontend-route-extension", "a:b", "--discovery-backend", "mem"),
        *(
            "--router-prefill-load-model",
            "ais",
            "--ais-backend",
            "vllm",
            "--ais-system",
            "h200",
            "--ais-model-path",
            "m",
        ),
        *("--tls-cert-path", "c", "--tls-key-path", "k", "--workers", "3")[:4],
    ]
    config, _, _ = parsed(arguments, {"DYN_ROUTER_TTL_SECS": "7"}, monkeypatch)
    launch = read_launch(translated(config), {"DYN_ES_FRONTEND_WORKERS": "3"})
    settings = launch.settings
    assert (settings.frontend.router_mode, settings.frontend.http_port, settings.frontend.namespace) == (
        "kv",
        0,
        "blue",
    )
    assert settings.frontend.active_prefill_tokens_threshold == 77
    assert (settings.router.router_temperature, settings.router.use_kv_events) == (0.5, False)
    assert (settings.router.router_ttl_secs, settings.router.router_prefill_load_model) == (7.0, "aic")
    assert (settings.aic.aic_backend, settings.aic.aic_model_path) == ("vllm", "m")
    assert (settings.tls.cert_path, settings.tls.key_path) == ("c", "k")
    assert (launch.launch.route_extensions, launch.launch.workers) == (("a:b",), 3)
    assert [note.partition(" ")[0] for note in launch.notes] == ["--discovery-backend"]


def test_a_flag_with_the_default_beats_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {
        "DYN_ROUTER_MODE": "kv",
        "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD": "0.5",
        "DYN_ENABLE_ANTHROPIC_API": "maybe",
        "DYN_GRPC_METRICS_PORT": "8788",
    }
    flags = ["--router-mode", "round-robin", "--active-decode-blocks-threshold", "None"]
    config, _, _ = parsed(flags, env, monkeypatch)
    frontend = read_launch(translated(config, None, env), env).settings.frontend
    assert (frontend.router_mode, frontend.active_decode_blocks_threshold) == ("round-robin", None)
    assert frontend.enable_anthropic_api is False


def test_arguments_about_tokenization_become_options(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = ["--tokenizer", "fastokens", "--no-tokenizer-fallback", "--dyn-preprocess-workers", "2"]
    settings = read_launch(translated(parsed(arguments, {}, monkeypatch)[0]), {}).settings
    assert (settings.frontend.tokenizer, settings.frontend.tokenizer_fallback) == ("fastokens", False)
    assert settings.chat_processor.preprocess_workers == 2
    with PreprocessPool(1, 0) as pool:
        assert processors_of(settings, pool, SystemClock()) is None
    assert "--dyn-preprocess-workers is for --dyn-chat-processor sglang" in caplog.text
    absent = parsed(["--tokenizer", "basetenkenizer"], {}, monkeypatch)[0]
    with pytest.raises(ConfigError, match="basetenkenizer"):
        read_launch(translated(absent), {})


def test_parsers_of_a_chat_processor_become_options(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--dyn-chat-processor", "sglang", "--tool-call-parser", "qwen25", "--chat-template", "t.jinja"]
    config, _, sglang_flags = parsed(arguments, {}, monkeypatch)
    made = read_launch(translated(config, sglang_flags), {}).settings.chat_processor
    assert (made.chat_processor, made.tool_call_parser, made.reasoning_parser) == ("sglang", "qwen25", None)
    assert made.chat_template == "t.jinja"


def test_the_module_starts_with_dynamos_arguments(tmp_path: Path) -> None:
    def said(*arguments: str) -> tuple[int, str]:
        env = {**os.environ, "DYN_ES_LOG": f"embedded://{tmp_path}/log"}
        command = [sys.executable, "-m", "dynamo_es.frontend", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)
        return done.returncode, done.stdout + done.stderr

    code, told = said("--router-mode", "kv", "--kserve-grpc-server")
    assert (code, told) == (2, "dynamo-es: --kserve-grpc-server (DYN_KSERVE_GRPC_SERVER) is not in this version; "
                               "models are served over HTTP\n")  # fmt: skip

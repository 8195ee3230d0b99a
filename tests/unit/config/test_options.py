from __future__ import annotations

import argparse
import dataclasses
import inspect

import pytest

from dynamo_es.config import command_options, tree
from dynamo_es.config.options import add_flags, load, option, options_of, origins, redacted, reference
from dynamo_es.config.tree import LogConfig, RouterConfig, WorkerConfig
from dynamo_es.errors import ConfigError
from dynamo_es.router.build import MODES
from dynamo_es.router.modes import mode_name

CONFIGS = [
    value
    for value in {**vars(tree), **vars(command_options)}.values()
    if inspect.isclass(value) and dataclasses.is_dataclass(value)
]
OPTIONS = [(config, item) for config in CONFIGS for item in options_of(config)]
NUMBERS = [(config, item) for config, item in OPTIONS if item.type in (int, float, int | None, float | None)]


def with_flag(config, item, value):
    return load(config, argparse.Namespace(**{f"{config.__name__}.{item.name}": value}), {})


def wrong(config, flags=None, env=None):
    with pytest.raises(ConfigError) as caught:
        load(config, argparse.Namespace(**flags) if flags else None, env or {})
    return str(caught.value)


@pytest.mark.parametrize(("config", "item"), NUMBERS, ids=[item.spec.flag for _, item in NUMBERS])
def test_every_number_has_bounds_and_keeps_them(config, item):
    spec = item.spec
    assert spec.minimum is not None
    assert spec.maximum is not None
    for value in (spec.minimum, spec.maximum):
        assert getattr(with_flag(config, item, str(value)), item.name) == value
    for value in (spec.minimum - 1, spec.maximum + 1):
        with pytest.raises(ConfigError, match=spec.flag):
            with_flag(config, item, str(value))
    assert item.default is None or spec.minimum <= item.default <= spec.maximum


def test_every_default_passes_its_own_check():
    for _, item in OPTIONS:
        if item.spec.check is not None and item.default is not None:
            item.spec.check(item.default)
        assert not item.spec.choices or item.default is None or item.default in item.spec.choices


def test_the_router_modes_are_those_that_the_router_has():
    assert {mode_name(mode) for mode in MODES} == set(tree.ROUTER_MODES)


def test_values_that_come_later_are_marked_and_refused(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Config:
        mode: str = option("a", flag="--mode", env="MODE", choices=["a", "b"], planned=["c", "d"], help="How.")

    assert "| `a`, `b` | How. Not in this version: `c`, `d`. |" in reference([Config])
    monkeypatch.setenv("COLUMNS", "1000")
    parser = argparse.ArgumentParser(prog="x")
    add_flags(parser, Config)
    assert "How. [not in this version: c, d; default a; env MODE]" in parser.format_help()
    assert wrong(Config, env={"MODE": "c"}) == "MODE=c is not available in this version; use one of a, b"


def test_an_empty_variable_is_unset_and_an_empty_flag_a_mistake():
    env = {"DYN_MODEL_NAME": "", "DYN_ENDPOINT": "  "}
    assert load(WorkerConfig, None, env) == WorkerConfig()
    assert origins(WorkerConfig, None, env)["model_name"] == "default"
    for empty in ("", "  "):
        assert "--model-name: the value is empty" in wrong(WorkerConfig, {"WorkerConfig.model_name": empty})


def test_none_takes_back_what_the_environment_set():
    flags = argparse.Namespace(**{"WorkerConfig.model_name": "none"})
    assert load(WorkerConfig, flags, {"DYN_MODEL_NAME": "x"}).model_name is None


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e400"])
def test_a_number_is_finite(value):
    assert "must be between 0 and 1000000000" in wrong(RouterConfig, env={"DYN_ROUTER_TEMPERATURE": value})


def test_what_is_shown_of_a_wrong_value_is_short_printable_and_without_secrets():
    assert "\\n" in wrong(WorkerConfig, env={"DYN_MODEL_NAME": "a\nb"})
    assert len(wrong(WorkerConfig, env={"DYN_MODEL_NAME": "a" * 100_000})) < 400
    message = wrong(LogConfig, env={"DYN_ES_LOG": "kafka://me:hunter2@h?sasl_plain_password=hunter2#x"})
    assert "hunter2" not in message
    assert "kafka://***@h?sasl_plain_password=***" in message


def test_values_are_shown_without_secrets():
    config = LogConfig(url="kafka://h:1?sasl_plain_username=me&sasl_plain_password=hunter2&client_id=x")
    assert redacted(config)["url"] == "kafka://h:1?sasl_plain_username=***&sasl_plain_password=***&client_id=x"

    @dataclasses.dataclass(frozen=True)
    class Config:
        token: str = option("", flag="--token", env="TOKEN", help="X.", secret=True, choices=["a"])

    assert redacted(Config("abc")) == {"token": "***"}
    assert redacted(Config()) == {"token": ""}
    assert wrong(Config, env={"TOKEN": "hunter2"}).startswith("TOKEN=***: expected one of a")

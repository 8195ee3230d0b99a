"""The Docker files name things that exist: sources, flags, ports, listeners."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import inspect
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo_es.config import tree
from dynamo_es.config.options import load, options_of

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
CONFIGS = [value for value in vars(tree).values() if inspect.isclass(value) and dataclasses.is_dataclass(value)]
FLAGS = {item.spec.flag: (config, item) for config in CONFIGS for item in options_of(config)}

each_command = pytest.mark.parametrize("command", [s["command"] for s in OURS.values()], ids=list(OURS))


def flags_of(command: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in command if word.startswith("--"))


def final_stage() -> list[str]:
    return DOCKERFILE.replace("\\\n", " ").rpartition("\nFROM ")[2].splitlines()


def instruction(name: str) -> str:
    return next(line.removeprefix(name).strip() for line in final_stage() if line.startswith(name + " "))


@each_command
def test_compose_uses_options_that_exist_with_values_they_take(command: list[str]) -> None:
    for flag, value in flags_of(command).items():
        config, item = FLAGS[flag]
        namespace = argparse.Namespace(**{f"{config.__name__}.{item.name}": value})
        assert str(getattr(load(config, namespace, {}), item.name)) == value


def test_workers_listen_on_all_addresses_and_register_their_service_name() -> None:
    assert FLAGS["--request-plane-advertise-host"][1].spec.env == "DYN_ES_ADVERTISE_HOST"
    workers = {name: service for name, service in OURS.items() if service["command"][0] == "worker"}
    assert len(workers) == 2
    for name, service in workers.items():
        assert flags_of(service["command"])["--request-plane-host"] == "0.0.0.0"
        assert service["environment"] == {"DYN_ES_ADVERTISE_HOST": name}


@each_command
def test_command_line_parses_compose_commands(command: list[str]) -> None:
    name = "dynamo_es.cli.main"
    if importlib.util.find_spec(name) is None:
        assert command[0] in {"frontend", "worker"}
        return
    importlib.import_module(name).build_parser().parse_args(command)


def test_frontend_and_workers_share_one_log_that_the_broker_advertises() -> None:
    logs = {flags_of(service["command"])["--log"] for service in OURS.values()}
    assert logs == {"kafka://kafka:9092"}
    assert "://kafka:9092" in SERVICES["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"]


def test_everything_waits_for_a_healthy_broker() -> None:
    assert SERVICES["kafka"]["healthcheck"]["test"][0] == "CMD"
    for service in OURS.values():
        assert service["depends_on"] == {"kafka": {"condition": "service_healthy"}}


def test_broker_listeners_are_all_mapped_and_advertised_but_the_controller() -> None:
    environment = SERVICES["kafka"]["environment"]
    listeners = {entry.split("://")[0] for entry in environment["KAFKA_LISTENERS"].split(",")}
    mapped = {entry.split(":")[0] for entry in environment["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(",")}
    advertised = {entry.split("://")[0] for entry in environment["KAFKA_ADVERTISED_LISTENERS"].split(",")}
    assert mapped == listeners
    assert advertised == listeners - {environment["KAFKA_CONTROLLER_LISTENER_NAMES"]}
    assert environment["KAFKA_INTER_BROKER_LISTENER_NAME"] in advertised


def test_published_port_health_check_and_default_are_one_port() -> None:
    port = flags_of(SERVICES["frontend"]["command"])["--http-port"]
    assert SERVICES["frontend"]["ports"] == [f"{port}:{port}"]
    assert instruction("EXPOSE") == port
    assert f"'DYN_HTTP_PORT', '{port}'" in instruction("HEALTHCHECK")
    assert str(FLAGS["--http-port"][1].default) == port
    assert FLAGS["--http-port"][1].spec.env == "DYN_HTTP_PORT"
    assert "/live" in instruction("HEALTHCHECK")


def test_only_the_frontend_has_an_http_health_check() -> None:
    disabled = {name for name, service in OURS.items() if service.get("healthcheck", {}).get("disable")}
    assert disabled == {name for name, service in OURS.items() if service["command"][0] == "worker"}


def test_containers_get_longer_to_stop_than_streams_to_drain() -> None:
    for service in OURS.values():
        grace = float(service["stop_grace_period"].removesuffix("s"))
        assert grace > FLAGS["--drain-timeout"][1].default
        assert grace > FLAGS["--http-graceful-shutdown-timeout"][1].default


def test_image_runs_the_installed_command_as_a_numbered_user() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert json.loads(instruction("ENTRYPOINT"))[0] in scripts
    assert int(instruction("USER")) > 0
    assert f"--uid {instruction('USER')} " in DOCKERFILE


def test_image_is_built_from_what_its_ignore_file_lets_through() -> None:
    allowed = {
        line[1:] for line in (ROOT / "docker" / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    assert {source for line in copied for source in line.split()} == allowed
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(packages["packages"]) <= allowed
    assert all((ROOT / source).exists() for source in packages["packages"])


def test_default_log_folder_lies_in_the_volume() -> None:
    assert FLAGS["--log"][1].default.removeprefix("embedded://").startswith(instruction("VOLUME") + "/")


@pytest.mark.parametrize("service", OURS.values(), ids=list(OURS))
def test_build_paths_exist(service: dict[str, Any]) -> None:
    context = (ROOT / "docker" / service["build"]["context"]).resolve()
    assert context == ROOT.resolve()
    assert (context / service["build"]["dockerfile"]).is_file()

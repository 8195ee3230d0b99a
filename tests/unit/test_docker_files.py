"""The Docker files name things that exist: sources, flags, ports, listeners."""

from __future__ import annotations

import argparse
import base64
import dataclasses
import inspect
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo_es.cli.main import build_parser
from dynamo_es.config import tree
from dynamo_es.config.options import load, options_of
from tests.conftest import _KAFKA_IMAGE

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
SMALL: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
CLUSTER: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.cluster.yaml").read_text())
FILES = {"compose": SMALL, "cluster": CLUSTER}
OURS = {
    f"{file}/{name}": service
    for file, compose in FILES.items()
    for name, service in compose["services"].items()
    if "build" in service
}
CONFIGS = [value for value in vars(tree).values() if inspect.isclass(value) and dataclasses.is_dataclass(value)]
FLAGS = {item.spec.flag: (config, item) for config in CONFIGS for item in options_of(config)}

each_file = pytest.mark.parametrize("compose", FILES.values(), ids=list(FILES))
each_command = pytest.mark.parametrize("command", [s["command"] for s in OURS.values()], ids=list(OURS))


def flags_of(command: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in command if word.startswith("--"))


def services(compose: dict[str, Any], role: str) -> dict[str, Any]:
    """Ours, by the command's first word."""
    return {
        name: service
        for name, service in compose["services"].items()
        if "build" in service and service["command"][0] == role
    }


def brokers(compose: dict[str, Any]) -> dict[str, Any]:
    return {name: service for name, service in compose["services"].items() if "KAFKA_NODE_ID" in str(service)}


def final_stage() -> list[str]:
    return DOCKERFILE.replace("\\\n", " ").rpartition("\nFROM ")[2].splitlines()


def instruction(name: str) -> str:
    return next(line.removeprefix(name).strip() for line in final_stage() if line.startswith(name + " "))


def test_the_fleets_are_as_large_as_they_say() -> None:
    roles = ("frontend", "worker", "streams")
    assert [len(services(SMALL, role)) for role in roles] == [1, 2, 0]
    assert [len(services(CLUSTER, role)) for role in roles] == [2, 3, 2]
    assert (len(brokers(SMALL)), len(brokers(CLUSTER))) == (1, 3)
    assert {"prometheus", "grafana"} <= CLUSTER["services"].keys()


@each_command
def test_compose_uses_options_that_exist_with_values_they_take(command: list[str]) -> None:
    for flag, value in flags_of(command).items():
        config, item = FLAGS[flag]
        namespace = argparse.Namespace(**{f"{config.__name__}.{item.name}": value})
        assert str(getattr(load(config, namespace, {}), item.name)) == value


@each_command
def test_command_line_parses_compose_commands(command: list[str]) -> None:
    build_parser().parse_args(command)


@each_file
def test_workers_listen_on_all_addresses_and_register_their_service_name(compose: dict[str, Any]) -> None:
    assert FLAGS["--request-plane-advertise-host"][1].spec.env == "DYN_ES_ADVERTISE_HOST"
    for name, service in services(compose, "worker").items():
        assert flags_of(service["command"])["--request-plane-host"] == "0.0.0.0"
        assert service["environment"] == {"DYN_ES_ADVERTISE_HOST": name}


@each_file
def test_all_share_one_log_of_brokers_that_advertise_these_names(compose: dict[str, Any]) -> None:
    ours = [service for service in compose["services"].values() if "build" in service]
    (url,) = {flags_of(service["command"])["--log"] for service in ours}
    servers = url.removeprefix("kafka://").split(",")
    assert [server.partition(":")[0] for server in servers] == list(brokers(compose))
    for server, broker in zip(servers, brokers(compose).values(), strict=True):
        assert f"FLEET://{server}" in broker["environment"]["KAFKA_ADVERTISED_LISTENERS"].split(",")


@each_file
def test_everything_waits_for_healthy_brokers(compose: dict[str, Any]) -> None:
    expected = {name: {"condition": "service_healthy"} for name in brokers(compose)}
    for broker in brokers(compose).values():
        assert broker["healthcheck"]["test"][0] == "CMD"
    for service in compose["services"].values():
        if "build" in service:
            assert service["depends_on"] == expected


@each_file
def test_broker_listeners_are_all_mapped_and_advertised_but_the_controller(compose: dict[str, Any]) -> None:
    for broker in brokers(compose).values():
        environment = broker["environment"]
        listeners = {entry.split("://")[0] for entry in environment["KAFKA_LISTENERS"].split(",")}
        mapped = {entry.split(":")[0] for entry in environment["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(",")}
        advertised = {entry.split("://")[0] for entry in environment["KAFKA_ADVERTISED_LISTENERS"].split(",")}
        assert mapped == listeners
        assert advertised == listeners - {environment["KAFKA_CONTROLLER_LISTENER_NAMES"]}
        assert environment["KAFKA_INTER_BROKER_LISTENER_NAME"] in advertised
        assert broker["image"] == _KAFKA_IMAGE, "the version that the tests run against"


def test_the_cluster_loses_nothing_with_one_broker() -> None:
    nodes = [broker["environment"] for broker in brokers(CLUSTER).values()]
    voters = nodes[0]["KAFKA_CONTROLLER_QUORUM_VOTERS"].split(",")
    assert voters == [
        f"{node['KAFKA_NODE_ID']}@{name}:9093" for name, node in zip(brokers(CLUSTER), nodes, strict=True)
    ]
    assert len({node["KAFKA_NODE_ID"] for node in nodes}) == len({node["KAFKA_LISTENERS"] for node in nodes}) == 3
    for node in nodes:
        # A KRaft cluster id is 16 bytes in base64 without padding.
        assert len(base64.urlsafe_b64decode(node["CLUSTER_ID"] + "==")) == 16
        assert (node["KAFKA_DEFAULT_REPLICATION_FACTOR"], node["KAFKA_MIN_INSYNC_REPLICAS"]) == ("3", "2")
        assert node["KAFKA_OFFSETS_TOPIC_REPLICATION_FACTOR"] == "3"
    ports = [port for service in CLUSTER["services"].values() for port in service.get("ports", ())]
    assert len({port.rsplit(":", 1)[0] for port in ports}) == len(ports)


@each_file
def test_published_port_health_check_and_default_are_one_port(compose: dict[str, Any]) -> None:
    for service in services(compose, "frontend").values():
        port = flags_of(service["command"])["--http-port"]
        assert [published.rpartition(":")[2] for published in service["ports"]] == [port]
        assert instruction("EXPOSE") == port
        assert f"'DYN_HTTP_PORT', '{port}'" in instruction("HEALTHCHECK")
        assert str(FLAGS["--http-port"][1].default) == port
    assert FLAGS["--http-port"][1].spec.env == "DYN_HTTP_PORT"
    assert "/live" in instruction("HEALTHCHECK")


@each_file
def test_processes_without_http_are_checked_on_their_status_port_or_not_at_all(compose: dict[str, Any]) -> None:
    for role in ("worker", "streams"):
        for service in services(compose, role).values():
            port = flags_of(service["command"]).get("--system-port")
            check = service["healthcheck"]
            assert check.get("disable", False) == (port is None)
            if port is not None:
                assert f"127.0.0.1:{port}/live" in check["test"][-1]


@each_file
def test_containers_get_longer_to_stop_than_streams_to_drain(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        if "build" in service:
            grace = float(service["stop_grace_period"].removesuffix("s"))
            assert grace > FLAGS["--drain-timeout"][1].default
            assert grace > FLAGS["--http-graceful-shutdown-timeout"][1].default


def test_state_of_the_cluster_lies_in_volumes_of_its_own() -> None:
    used = []
    for role in ("frontend", "streams"):
        for service in services(CLUSTER, role).values():
            (volume,) = service["volumes"]
            name, _, place = volume.partition(":")
            used.append(name)
            assert flags_of(service["command"])["--state-dir"].startswith(place + "/")
    data = [volume.partition(":")[0] for broker in brokers(CLUSTER).values() for volume in broker["volumes"]]
    assert len(set(used + data)) == len(used + data)
    assert {*used, *data, "prometheus-data"} == CLUSTER["volumes"].keys()


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

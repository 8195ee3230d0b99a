"""What a frontend's options come to before anything is started."""

from __future__ import annotations

import json
import resource
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dynamo_es.cli.launch import CONFIGS, Launch, child_arguments, prepare, raise_fd_limit, read_launch
from dynamo_es.cli.main import build_parser
from dynamo_es.cli.supervisor import Backoff
from dynamo_es.config.dynamo_options import DynamoConfig
from dynamo_es.config.options import options_of
from dynamo_es.errors import ConfigError


def launch(*arguments: str, env: Mapping[str, str] | None = None) -> Launch:
    return read_launch(build_parser().parse_args(["frontend", *arguments]), env or {})


def refused(*arguments: str, env: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        launch(*arguments, env=env)
    return str(caught.value)


def test_processes_have_the_same_options_but_for_what_is_their_own() -> None:
    made = launch(
        "--frontend-route-extension", "a:b", "--frontend-route-extension=c", "--workers", "3", "--state-dir", "/s",
        "--no-router-kv-events", "--namespace=-i",
    )  # fmt: skip
    for index in range(3):
        line = child_arguments(made, "/tmp/f", index, 8123)
        child = read_launch(build_parser().parse_args(line), {"DYN_ES_FRONTEND_WORKERS": "3"})
        assert child.sibling == (Path("/tmp/f"), index, 3)
        assert child.settings.process.state.state_dir == f"/s/process-{index}"
        assert child.settings.frontend.http_port == 8123
        assert child.settings.frontend.namespace == "-i"
        assert child.settings.router == made.settings.router
        assert child.launch.route_extensions == ("a:b", "c")


def test_pauses_double_until_a_process_has_settled() -> None:
    backoff = Backoff(first_s=1, longest_s=5, settled_s=60)
    assert [backoff.pause_after(ran_s) for ran_s in (0, 2, 0, 0, 0, 61, 1)] == [1, 2, 4, 5, 5, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--workers", "2", "--interactive"], "--workers is for the HTTP frontend"),
        (["--workers", "2", "--request-plane-port", "7000"], "--request-plane-port names one port"),
        (["-i", "--frontend-route-extension", "a:b"], "it cannot be combined with --interactive"),
        (["--kserve-grpc-server"], "--kserve-grpc-server (DYN_KSERVE_GRPC_SERVER) is not in this version"),
        (["--tcp-tls-key-path", "k"], "encrypt that with --curve-key-file"),
        (["--dump-config-to", "/proc/no/file"], "--dump-config-to /proc/no/file cannot be written"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: list[str], told: str) -> None:
    assert told in refused(*arguments)


def test_options_that_change_nothing_are_told() -> None:
    made = launch("--request-plane", "tcp", env={"DYN_DISCOVERY_BACKEND": "etcd", "NATS_TLS_INSECURE": "1"})
    assert [note.partition(" ")[0] for note in made.notes] == [
        *("--discovery-backend", "--request-plane", "--nats-tls-insecure"),
    ]
    assert launch().notes == []


def test_load_aware_means_kv_routing() -> None:
    assert launch("--load-aware").settings.frontend.router_mode == "kv"


def test_extensions_come_from_a_variable_with_white_space_between_them() -> None:
    made = launch(env={"DYN_FRONTEND_ROUTE_EXTENSIONS": " a:b\n c:d "})
    assert made.launch.route_extensions == ("a:b", "c:d")


@pytest.mark.parametrize(
    ("provider", "problem"),
    [
        (lambda: 1 / 0, "'extmod:make' failed with ZeroDivisionError at .*: division by zero"),
        (lambda: {}[0], "'extmod:make' failed with KeyError"),
        (lambda: int("x"), "'extmod:make' failed with ValueError"),
        (5, "'extmod:make' must resolve to a callable"),
    ],
)
def test_a_provider_of_routes_that_fails_is_told_by_name(
    provider: Any, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    extmod = types.ModuleType("extmod")
    extmod.make = provider  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "extmod", extmod)
    with pytest.raises(ConfigError, match=f"^--frontend-route-extension .*{problem}"):
        prepare(launch("--frontend-route-extension", "extmod:make", "--log", "embedded:///nowhere/x"))


def test_the_dump_tells_values_sources_and_no_secrets(tmp_path: Path) -> None:
    file = tmp_path / "dump.json"
    url = "kafka://h:1?sasl_plain_username=u&client_id=x"
    launch("--http-port", "0", "--log", url, env={"DYN_DUMP_CONFIG_TO": str(file), "DYN_NAMESPACE": "blue"})
    options: dict[str, Any] = json.loads(file.read_text())["options"]
    assert options["--http-port"] == {"value": 0, "env": "DYN_HTTP_PORT", "source": "--http-port"}
    assert options["--namespace"] == {"value": "blue", "env": "DYN_NAMESPACE", "source": "DYN_NAMESPACE"}
    assert options["--workers"]["source"] == "default"
    assert options["--log"]["value"] == "kafka://h:1?sasl_plain_username=***&client_id=x"
    assert set(options) == {item.spec.flag for config in CONFIGS for item in options_of(config)}


def test_every_option_that_changes_nothing_or_is_refused_says_so() -> None:
    words = ("Taken and ignored: ", "Refused: ", "Deprecated: ")
    assert all(item.spec.help.startswith(words) for item in options_of(DynamoConfig))


def test_the_limit_of_open_files_is_raised_and_never_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, asked = (1024, 4096), []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, wanted: asked.append(wanted))
    for target in (-1, 0, 512, 2048, 8192):
        raise_fd_limit(target)
    assert asked == [(2048, 4096), (4096, 4096)]

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import Counter

import pytest

from dynamo_es.cli.config import TREE
from dynamo_es.cli.main import build_parser, main
from dynamo_es.config.options import options_of, reference


def run(*arguments, env=None, timeout=60):
    return subprocess.run(
        [sys.executable, "-m", "dynamo_es.cli.main", *arguments],
        capture_output=True, text=True, timeout=timeout, env={**os.environ, **(env or {})}, check=False,
    )  # fmt: skip


def refused(*arguments, env=None):
    """The one line that a mistake is worth: no traceback, exit code 2."""
    result = run(*arguments, env=env)
    assert result.returncode == 2, result
    lines = [line for line in result.stderr.strip().splitlines() if line.startswith("dynamo-es:")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    return lines[0]


FRONTEND = ("frontend", "--http-host", "127.0.0.1", "--http-port", "0")


def test_an_unknown_log_scheme():
    assert "expected embedded:///dir" in refused(*FRONTEND, "--log", "redis://x")


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("{tmp}/file", "{tmp}/file is not a folder"),
        ("{tmp}/file/log", "{tmp}/file is not a folder"),
        ("{tmp}/link/log", "{tmp}/link is a link to something that is not there"),
        ("/proc/no/log", "no folder can be made in /proc"),
    ],
)
def test_a_place_where_no_log_can_be(tmp_path, place, reason):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    place = place.format(tmp=tmp_path)
    line = refused("topics", "create", "--log", f"embedded://{place}")
    assert line.startswith(f"dynamo-es: {place} cannot be used: {reason.format(tmp=tmp_path)}")
    assert line.endswith("; choose another folder with --log embedded:///dir")


def test_a_folder_of_a_newer_format(tmp_path):
    (tmp_path / "log").mkdir()
    assert run("topics", "create", "--log", f"embedded://{tmp_path}/log").returncode == 0
    meta = json.loads((tmp_path / "log" / "log.json").read_text())
    key = next(name for name in meta if "version" in name or "format" in name)
    (tmp_path / "log" / "log.json").write_text(json.dumps({**meta, key: 99}))
    line = refused("topics", "list", "--log", f"embedded://{tmp_path}/log")
    assert "99" in line


def test_a_folder_that_is_something_else(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    refused("topics", "list", "--log", f"embedded://{tmp_path}")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_broker_that_is_not_there():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    line = refused(*FRONTEND, "--log", f"kafka://127.0.0.1:{port}")
    assert f"127.0.0.1:{port}" in line


def test_a_port_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refused("frontend", "--http-host", "127.0.0.1", "--http-port", port, "--log", f"embedded://{tmp_path}/l")
    assert f"127.0.0.1:{port}" in line
    assert "--http-port" in line


def test_a_request_plane_port_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refused(*FRONTEND, "--request-plane-port", port, "--log", f"embedded://{tmp_path}/l")
    assert "--request-plane-port" in line


def test_a_model_directory_without_tokenizer(tmp_path):
    (tmp_path / "model").mkdir()
    line = refused("worker", "mock", "--model-path", str(tmp_path / "model"), "--log", f"embedded://{tmp_path}/l")
    assert str(tmp_path / "model") in line
    assert "tokenizer.json" in line


def test_a_model_directory_that_is_not_there(tmp_path):
    line = refused("worker", "mock", "--model-path", str(tmp_path / "no"), "--log", f"embedded://{tmp_path}/l")
    assert "there is no such directory" in line


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--http-port", "x"], "--http-port=x: expected a whole number"),
        (["--http-port", "70000"], "must be between 0 and 65535"),
        (["--router-mode", "best"], "expected one of round-robin"),
        (["--heartbeat", "9", "--lease-ttl", "10"], "must be under a third"),
        (["--router-temperature", "-1"], "must be between 0 and"),
    ],
)
def test_wrong_values(tmp_path, flags, expected):
    assert expected in refused(*FRONTEND, *flags, "--log", f"embedded://{tmp_path}/l")


def test_a_wrong_value_in_the_environment_names_the_variable(tmp_path):
    line = refused(*FRONTEND[:3], "--log", f"embedded://{tmp_path}/l", env={"DYN_HTTP_PORT": "many"})
    assert "DYN_HTTP_PORT=many" in line


def test_a_state_folder_that_another_process_has(tmp_path):
    from pathlib import Path

    from dynamo_es.runtime.process_store import ALL_FAMILIES
    from dynamo_es.store.rocks import RocksStore

    store = RocksStore(Path(tmp_path / "state"), ALL_FAMILIES)
    try:
        line = refused(*FRONTEND, "--log", f"embedded://{tmp_path}/l", "--state-dir", str(tmp_path / "state"))
    finally:
        store.close()
    assert "held by another process" in line
    assert "--state-dir" in line


def test_topics_and_state_on_a_log(tmp_path):
    url = f"embedded://{tmp_path}/log"
    created = run("topics", "create", "--log", url)
    assert "dynamo.kv-events" in created.stdout
    assert "missing" not in created.stdout
    shown = run("state", "show", "--log", url)
    assert shown.stdout.startswith("registry: 0 offsets folded")
    assert created.stderr == shown.stderr == ""
    assert run("topics", "read", "requests", "--log", url).stdout == ""
    assert "no topic 'nope'; there are kv-events" in refused("topics", "read", "nope", "--log", url)
    assert "there is no state store here" in refused(
        "state", "verify", "--log", url, "--state-dir", str(tmp_path / "x")
    )


def test_commands_that_look_say_more_if_they_are_asked(tmp_path):
    url = f"embedded://{tmp_path}/log"
    assert " INFO " in run("topics", "create", "--log", url, env={"DYN_LOG": "error,dynamo=info"}).stderr
    assert " INFO " in run("topics", "list", "--log", url, "--log-level", "info").stderr
    assert run("topics", "list", "--log", url, "--log-level", "info,dynamo_es.log=off").stderr == ""


def test_a_reader_of_the_output_that_goes_away_is_no_error(tmp_path):
    url = f"embedded://{tmp_path}/log"
    assert run("topics", "create", "--log", url).returncode == 0
    read, write = os.pipe()
    os.close(read)
    try:
        result = subprocess.run(
            [sys.executable, "-m", "dynamo_es.cli.main", "topics", "list", "--log", url],
            stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
    finally:
        os.close(write)
    assert (result.returncode, result.stderr) == (0, "")


def test_topics_read_from_a_place_that_is_not_there(tmp_path, capsys):
    log = ["--log", f"embedded://{tmp_path}/log"]
    assert main(["topics", "create", *log]) == 0
    for place, expected in (
        (["--partition", "7"], "--partition 7: dynamo.registry has partitions 0 to 0"),
        (["--partition", "0", "--offset", "1"], "--offset 1: dynamo.registry[0] has offsets 0 to 0"),
    ):
        capsys.readouterr()
        assert main(["topics", "read", "registry", *log, *place]) == 2
        assert capsys.readouterr().err == f"dynamo-es: {expected}\n"
    assert main(["topics", "read", "registry", *log, "--partition", "0", "--offset", "0"]) == 0


def test_OPS_06_config_shows_values_with_their_origin(capsys, monkeypatch):
    monkeypatch.setenv("DYN_HTTP_PORT", "1234")
    assert main(["config", "--router-mode", "kv"]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert lines["--http-port"][1:] == ["1234", "DYN_HTTP_PORT"]
    assert lines["--router-mode"][1:] == ["kv", "--router-mode"]
    assert lines["--heartbeat"][1:] == ["2.5", "default"]


def test_every_option_has_flag_help_and_a_variable():
    flags = Counter(item.spec.flag for config in TREE for item in options_of(config))
    for config in TREE:
        for item in options_of(config):
            assert item.spec.help.endswith(".")
            assert item.spec.env
    # The frontend's and the workers', or those of several engines: no command has two of a name.
    assert {flag for flag, count in flags.items() if count > 1} == {
        "--model-path", "--model-name", "--num-gpu-blocks-override", "--block-size", "--max-num-seqs",
        "--max-num-batched-tokens", "--max-model-len", "--enable-prefix-caching",
        "--worker-type",
    }  # fmt: skip
    assert reference(TREE).count("\n") == flags.total() + 1


def test_help_of_every_verb():
    parser = build_parser()
    for verb in (["frontend"], ["worker", "mock"], ["topics", "list"], ["state", "show"], ["config"], ["demo"]):
        with pytest.raises(SystemExit) as end:
            parser.parse_args([*verb, "--help"])
        assert end.value.code == 0


def test_the_table_of_options_in_the_readme_is_current():
    from pathlib import Path

    from dynamo_es.config.document import with_reference

    readme = Path(__file__).parents[2] / "README.md"
    assert with_reference(readme.read_text()) == readme.read_text()

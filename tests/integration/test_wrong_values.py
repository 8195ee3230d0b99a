"""Every option of every command with values that it cannot have: exit code 2, one line, nothing opened or made."""

from __future__ import annotations

import argparse
import dataclasses
import inspect

import pytest

from dynamo_es.cli import demo, diagnose, launch, process, relay, streams
from dynamo_es.cli import main as command_line
from dynamo_es.cli.main import build_parser, main
from dynamo_es.config import (
    access_log_options,
    aic_options,
    attach_options,
    command_options,
    dynamo_options,
    frontend_options,
    indexer_options,
    launch_options,
    lora_options,
    processor_options,
    relay_options,
    security_options,
    telemetry_options,
    transformers_options,
    tree,
    vllm_options,
)
from dynamo_es.config.options import options_of

CONFIGS = {
    name: value
    for module in (
        *(tree, command_options, aic_options, dynamo_options, frontend_options, indexer_options, launch_options),
        *(processor_options, security_options, telemetry_options, access_log_options, attach_options),
        *(transformers_options, lora_options, relay_options, vllm_options),
    )
    for name, value in vars(module).items()
    if inspect.isclass(value) and dataclasses.is_dataclass(value)
}
# What an option that is text does not take, beside nothing at all and control characters.
BAD_TEXT = {
    "--log": [
        "/tmp/x", "x", "redis://x", "embedded:", "embedded://rel/dir", "embedded:~/x", "embedded:///a#b",
        "embedded:///a%00b", "embedded:///x?segment_bytes=1", "embedded:///x?durability=maybe", "embedded:///x?no=1",
        "kafka://", "kafka://h:99999", "kafka://[::1", "kafka://u:p@h", "kafka://h?no=1",
        "kafka://h?security_protocol=SASL_SSL&sasl_plain_username=u&sasl_plain_password=x", "memory://?x=1",
    ],
    "--topic-retention": ["24h", "requests=24", "nope=1h", "registry=1h", "requests=0h"],
    "--topic": [" x", "x" * 257],
    "--access-log": ["~/x"],
    "--otel-traces-endpoint": ["x", "ftp://h/v1", "http://", "http://u:p@h"],
    "--otel-traces-protocol": ["x", "grpc"],
    "--otel-service-name": [" x", "x" * 257],
    "--upstream": ["x", "ftp://h", "http://", "http://h:0", "http://u:p@h", "http://h/?key=x"],
    "--url": ["x", "ftp://h", "http://", "http://h:0", "http://u:p@h", "http://h/?key=x"],
    "--model": [" x", "x" * 257],
    "--api-key-file": ["~/x"],
    "--ca-cert-path": ["~/x"],
    "--upstream-model": [" x", "x" * 257],
    "--upstream-api": ["x"],
    "--upstream-input": ["x"],
    "--upstream-api-key-file": ["~/x"],
    "--upstream-ca-cert-path": ["~/x"],
    "--kv-events": ["x", "tcp://*:5557", "http://h:1"],
    "--kv-events-replay": ["x", "tcp://*:5557"],
    "--kv-events-topic": [" x", "x" * 257],
    "--dtype": ["x"],
    "--device": [],  # known to torch, when the model is loaded
    "--lora": ["x", "=file:///x", "a b=file:///x"],
    "--lora-source": ["x", "http://h", "file://x", "file:///", "file:///a b", "s3://", "hf:///", "file:///a/../b"],
    "--dc-id": [" x", "x" * 257],
    "--namespaces": ["a,,b", "a,a", "a.b", "a b"],
    "--namespace-filter": ["a.b", "a b"],
    "--endpoint-prefix": ["a,,b", "a,a"],
    "--relay-namespace": ["a.b", "a b"],
    "--relay-source": ["x", "a b=embedded:///x", "=embedded:///x"],
    "--relay-host": ["a b", "tcp://x"],
    "--token-ids": ["x", "1,,2", "-1", "4294967296", "1.5"],
    "--token-ids-file": ["~/x"],
    "--lora-name": [" x", "x" * 257],
    "--cache-salt": [" x", "x" * 257],
    "--reason": ["x", "undecodable,rejected"],
    "--since": ["x", "24", "24x", "0h", "2026-05-01", "2026-05-01T12:00:00", "2026-13-01T00:00:00Z", "99999d"],
    "--topic-namespace": ["a/b", "x" * 201],
    "--state-dir": ["~/x"],
    "--request-plane-host": ["a b", "tcp://x", "127.0.0.1:1"],
    "--request-plane-advertise-host": ["a b", "*"],
    "--curve-key-file": ["~/x"],
    "--tls-cert-path": ["~/x"],
    "--tls-key-path": ["~/x"],
    "--tls-key-password-file": ["~/x"],
    "--tls-client-ca-cert-path": ["~/x"],
    "--api-keys-file": ["~/x"],
    "--name": [" x", "x" * 257],
    "--models": [",", "a,", "a,,b", "x" * 257],
    "--dump-config-to": ["~/x"],
    "--frontend-route-extension": [" x"],
    "--namespace-prefix": ["a.b", "a b"],
    "--metadata-header": ["X-Dynamo-", "a b", "-x"],
    "--discovery-backend": ["consul"],
    "--request-plane": ["http"],
    "--response-plane": ["nats"],
    "--event-plane": ["tcp"],
    "--admission-control": ["x"],
    **{
        f"--tcp-tls-{name}-path": ["~/x"]
        for name in ("cert", "key", "ca-cert", "client-cert", "client-key", "client-ca-cert")
    },
    **{f"--nats-tls-{name}-path": ["~/x"] for name in ("ca-cert", "client-cert", "client-key")},
    "--dyn-chat-processor": ["x"],
    "--tool-call-parser": [],  # known to the library that the processor uses
    "--reasoning-parser": [],  # the same
    "--chat-template": ["~/x"],
    "--system-host": ["a b", "http://x", "127.0.0.1:80"],
    "--http-host": ["a b", "http://x", "127.0.0.1:80", "a..b"],
    "--router-mode": ["best", "KV"],
    "--namespace": ["a.b", "a b"],
    "--model-path": ["~/x"],
    "--metrics-prefix": ["1x", "a-b"],
    "--endpoint": ["a.b", "a..c", "a.b.c.d"],
    "--model-name": [" x", "x" * 257],
    "--log-level": ["loud", "info,dynamo", "info,dynamo=loud", "[span]=info"],
    "--dir": ["~/x"],
    "--router-approximate-cache-policy": ["fifo"],
    "--router-prefill-load-model": ["x"],
    "--router-tracking-hash": ["xxh3"],
    "--router-tracking-key-file": ["~/x"],
    "--router-tracking-key-id": [" x", "x" * 257],
    "--router-queue-policy": ["sjf"],
    "--router-policy-config": ["~/x"],
    "--router-prefill-policy": [" x"],
    "--router-decode-policy": [" x"],
    "--shared-cache-type": ["hicache", "x"],
    "--router-conditional-disagg-config": [],  # checked with the options beside it, when the router is made
    "--router-conditional-disagg-policy": ["x"],
    "--router-session-affinity-mode": ["x"],
    "--streams-group": ["a/b", "x" * 201],
    "--aic-model-path": ["~/x"],
    "--aic-nextn-accept-rates": [],  # checked with --aic-nextn beside it, when the router is made
    "--dyn-reasoning-parser": ["x"],
    "--dyn-tool-call-parser": ["x"],
    "--model-type": ["x", "Chat | x"],
    "--partitions": ["x", "3-1", "0,99", "-1", "0-"],
    "--reasoning-field-name": ["x"],
    "--worker-type": ["x"],
    "--tokenizer": ["x", "basetenkenizer"],
    "--engine-type": ["x"],
    "--preemption-mode": ["x"],
    "--planner-profile-data": ["~/x"],
    "--reasoning": [],  # checked with the other arguments, when the engine is made
    "--response-replay-trace-path": ["~/x"],
    "--sglang-schedule-policy": ["x"],
    "--trtllm-capacity-scheduler-policy": ["max_utilization"],
    "--zmq-kv-events-ports": ["x", "99999", "1,", "-1"],
    "--zmq-replay-ports": ["x", "99999", "1,", "-1"],
    "--kv-transfer-timing-mode": ["x"],
    "--bootstrap-ports": ["x", "99999", "1,", "-1"],
    "--extra-engine-args": ["~/x"],
    **{
        f"--aic-{name}": [" x", "x" * 257]
        for name in (
            "backend", "backend-version", "comm-dtype", "fmha-dtype", "gemm-dtype", "kv-cache-dtype", "moe-dtype",
            "system",
        )
    },
    **{
        f"--http-{name}-path": ["v1/x", "/x/", "/", "/a b", "/{x}"]
        for name in (
            "anthropic", "chat", "classify", "completions", "embeddings", "health", "live", "metrics", "models",
            "pooling", "rerank", "responses",
        )
    },
}  # fmt: skip


LOOKING = [
    ("topics", "list"), ("topics", "read"), ("topics", "plan"), ("topics", "check"), ("state", "show"),
    ("state", "verify"), ("dead-letters", "list"), ("dead-letters", "show"), ("dead-letters", "retry"),
    ("diagnose",), ("relay", "query"), ("relay", "serve"),
]  # fmt: skip


def commands(parser, words=()):
    """Words and options of every command that there is."""
    deeper = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in deeper:
        for name, sub in action.choices.items():
            yield from commands(sub, (*words, name))
    if not deeper:
        options = []
        for action in parser._actions:
            config, dot, field = action.dest.partition(".")
            if dot:
                options.append(next(item for item in options_of(CONFIGS[config]) if item.name == field))
        yield words, options


# Thousands of calls are made here; one parser serves them all.
PARSER = build_parser()
CASES = [(words, item) for words, options in commands(PARSER) for item in options]
WITHOUT_LOG = [("demo",), ("keys", "add"), ("keys", "list"), ("keys", "revoke")]
POSITIONAL = {
    ("keys", "revoke"): ["0"],
    ("topics", "read"): ["requests"],
    ("worker", "attach"): ["--upstream", "http://127.0.0.1:9"],
    ("relay", "run"): ["--dc-id", "x"],
    ("relay", "query"): ["--model", "m", "--token-ids", "1"],
    ("dead-letters", "show"): ["0"],
    ("dead-letters", "retry"): ["--all"],
}


def bad_values(item):
    spec = item.spec
    if item.type is bool:
        return ["maybe"]
    if spec.minimum is not None:
        below, above = spec.minimum - 1, spec.maximum + 1
        values = ["", " ", "x", "nan", "inf", "-inf", "1e999", "9" * 5000, str(below), str(above)]
        return [*values, "1.5"] if item.type in (int, int | None) else values
    assert spec.flag in BAD_TEXT, f"{spec.flag} is new: add values that it does not take"
    return ["", "a\nb", *BAD_TEXT[spec.flag]]


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch, tmp_path):
    """A value that slips through must not start a fleet in the middle of the tests."""

    def reached(coroutine):
        coroutine.close()
        raise AssertionError("the command began to run")

    monkeypatch.setattr(command_line, "build_parser", lambda *used: PARSER)
    for module in (process, streams, demo, diagnose, launch, relay):
        monkeypatch.setattr(module, "run_async", reached)
    monkeypatch.chdir(tmp_path)
    for config in CONFIGS.values():
        for item in options_of(config):
            if item.spec.env:
                monkeypatch.delenv(item.spec.env, raising=False)


def refused(capsys, *arguments):
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert code == 2, (arguments, out, err)
    assert err.count("\n") == 1, err
    assert err.startswith("dynamo-es: "), err
    assert out == ""
    return err.strip()


def test_the_table_covers_all_options_and_commands():
    flags = {item.spec.flag for config in CONFIGS.values() for item in options_of(config)}
    assert {item.spec.flag for _, item in CASES} == flags
    assert {words for words, _ in CASES} == {
        ("frontend",), ("indexer",), ("streams",),
        ("worker", "mock"), ("worker", "transformers"), ("worker", "vllm"), ("worker", "attach"),
        ("topics", "create"), ("topics", "list"), ("topics", "read"),
        ("topics", "plan"), ("topics", "apply"), ("topics", "check"),
        ("dead-letters", "list"), ("dead-letters", "show"), ("dead-letters", "retry"),
        ("relay", "run"), ("relay", "query"), ("relay", "serve"),
        ("state", "show"), ("state", "verify"), ("diagnose",), ("config",), *WITHOUT_LOG,
    }  # fmt: skip


@pytest.mark.parametrize(("words", "item"), CASES, ids=[f"{'-'.join(words)}{item.spec.flag}" for words, item in CASES])
def test_wrong_values_of_a_flag(capsys, tmp_path, words, item):
    flag = item.spec.flag
    log = [] if flag == "--log" or words in WITHOUT_LOG else ["--log", f"embedded://{tmp_path}/log"]
    state = ["--state-dir", str(tmp_path / "s")] if words == ("state", "verify") and flag != "--state-dir" else []
    for value in bad_values(item):
        line = refused(capsys, *words, *POSITIONAL.get(words, []), *log, *state, f"{flag}={value}")
        assert flag in line or (flag == "--log" and "URL" in line)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", [name for name, config in CONFIGS.items() if any(item.spec.env for item in options_of(config))]
)
def test_wrong_values_of_a_variable(capsys, monkeypatch, tmp_path, name):
    words = next(words for words, item in CASES if item in list(options_of(CONFIGS[name])))
    for item in [item for item in options_of(CONFIGS[name]) if item.spec.env]:
        for value in bad_values(item):
            # White space separates the values of a variable with several.
            if value.strip() and not (item.spec.many and "\n" in value):
                monkeypatch.setenv(item.spec.env, value)
                line = refused(capsys, *words)
                assert item.spec.env in line or (item.spec.flag == "--log" and "URL" in line)
        monkeypatch.delenv(item.spec.env)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "required: VERB"),
        (["serve"], "invalid choice: 'serve'"),
        (["frontend", "--no-such"], "unrecognized arguments: --no-such"),
        (["frontend", "--http-p", "1"], "unrecognized arguments: --http-p"),
        # OPS-06: who mistakes one switch for another is told the right one.
        (
            ["frontend", "--active-decode-threshold", "0.85"],
            "--active-decode-threshold 0.85; did you mean --active-decode-blocks-threshold? see",
        ),
        (["frontend", "--router-kv-overlap-weight=1"], "did you mean --router-kv-overlap-score-weight? see"),
        (
            ["worker", "mock", "--router-mode", "kv"],
            "--router-mode kv; --router-mode is an option of dynamo-es frontend, ",
        ),
        (["frontend", "--active-decode-blocks-threshold", "85"], "threshold=85: must be between 0 and 1"),
        (["frontend", "extra"], "unrecognized arguments: extra"),
        (["frontend", "--http-port"], "expected one argument"),
        (["worker"], "required: ENGINE"),
        (["worker", "trtllm"], "invalid choice: 'trtllm'"),
        (["topics"], "required: ACTION"),
        (["topics", "read"], "required: topic"),
        (["topics", "read", "nope"], "no topic 'nope'; there are kv-events"),
        (["topics", "read", "requests", "--offset", "3"], "--offset needs --partition"),
        (["state", "show", "nope"], "invalid choice: 'nope'"),
        (["state", "verify"], "state verify needs --state-dir"),
        (["config", "a\nb"], "a\\nb"),
    ],
)
def test_wrong_words(capsys, arguments, expected):
    assert expected in refused(capsys, *arguments)


@pytest.mark.parametrize("words", [words for words in dict(CASES) if words not in (("config",), *WITHOUT_LOG)])
def test_no_command_takes_a_log_that_nobody_else_can_see(capsys, words):
    line = refused(capsys, *words, *POSITIONAL.get(words, []), "--log", "memory://", *_state_of(words))
    assert "memory:// is a log within one process: no other process would see" in line
    assert "embedded:///dir" in line


@pytest.mark.parametrize("words", LOOKING)
def test_commands_that_only_look_make_no_log(capsys, tmp_path, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    for place in ("no", "no/deeper", "empty", "file", "file/x"):
        url = f"embedded://{tmp_path}/{place}"
        line = refused(capsys, *words, *POSITIONAL.get(words, []), "--log", url, *_state_of(words))
        assert f"there is no log at {url}; check the path" in line
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("words", [("frontend",), ("worker", "mock")])
def test_a_state_folder_that_cannot_be_is_told_before_a_log_is_made(capsys, tmp_path, words):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.iterdir())
    for place, reason in (("file", "is not a folder"), ("file/x", "file is not a folder"), ("link/x", "is a link to")):
        line = refused(capsys, *words, "--log", f"embedded://{tmp_path}/log", "--state-dir", str(tmp_path / place))
        assert line.startswith(f"dynamo-es: --state-dir {tmp_path}/{place} cannot be used: ")
        assert reason in line
    assert sorted(tmp_path.iterdir()) == before


def test_a_model_directory_that_a_frontend_cannot_load(capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    for place, reason in (("no", "it is not a directory"), ("empty", "tokenizer.json")):
        path = str(tmp_path / place)
        line = refused(capsys, "frontend", "--log", f"embedded://{tmp_path}/log", "--model-path", path)
        assert path in line
        assert reason in line
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_a_demo_folder_that_cannot_be(capsys, tmp_path):
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "x", "/proc/no/demo"):
        line = refused(capsys, "demo", "--dir", str(place))
        assert f"--dir {place} cannot be used: " in line
        assert "choose another folder" in line
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def _state_of(words):
    return ["--state-dir", "state"] if words == ("state", "verify") else []

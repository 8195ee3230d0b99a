"""Where the tests find a Kafka, and when they look for one."""

from __future__ import annotations

import contextlib
import gc
import os
import time
import warnings
from collections.abc import Iterator

import pytest
from hypothesis import settings

SERVERS_VARIABLE = "KAFKA_BOOTSTRAP_SERVERS"
ENABLE_VARIABLE = "DYN_ES_TEST_KAFKA"
_HOW = f"needs Kafka; run with --kafka, {ENABLE_VARIABLE}=1 or {SERVERS_VARIABLE}=host:port"
_KAFKA_IMAGE = "apache/kafka:4.3.1"
_DOCKER_TIMEOUT_S = 120.0


# The same examples in every run; other ones: pytest --hypothesis-profile=random
settings.register_profile("same", derandomize=True)
settings.register_profile("random", derandomize=False)
settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kafka", action="store_true", help="run the tests that need a Kafka, starting one if need be")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--kafka") or in_ci() or SERVERS_VARIABLE in os.environ or ENABLE_VARIABLE in os.environ:
        return
    for item in items:
        if item.get_closest_marker("kafka"):
            item.add_marker(pytest.mark.skip(reason=_HOW))


def pytest_collection_finish() -> None:
    """The collector need not walk thousands of tests, and what they import, again and again while they run."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """In CI a Kafka test that skips has failed: nothing else would notice that the broker went missing."""
    report = yield
    if in_ci() and report.skipped and not hasattr(report, "wasxfail") and item.get_closest_marker("kafka"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} skipped with CI=true: {report.longrepr}"
    return report


def in_ci() -> bool:
    """Is this a run that must not leave anything out?"""
    return os.environ.get("CI", "").lower() in ("1", "true", "yes")


@pytest.fixture(scope="session")
def kafka_bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """``host:port`` of a Kafka: the one that is named, else one in Docker, else one from Maven's jars on Java."""
    if servers := os.environ.get(SERVERS_VARIABLE):
        yield servers
        return
    with contextlib.ExitStack() as stack:
        docker_reason = _no_docker()
        if docker_reason is None:
            yield stack.enter_context(_kafka_in_docker())
            return
        from tests.kafka.broker import KafkaBroker, KafkaSetupError, missing_tools

        reason = missing_tools()
        if reason is None:
            broker = KafkaBroker(tmp_path_factory.mktemp("kafka"))
            stack.callback(broker.stop)
            try:
                broker.start()
            except KafkaSetupError as error:
                reason = str(error)
        if reason is not None:
            pytest.skip(f"no Kafka: {SERVERS_VARIABLE} is not set; Docker: {docker_reason}; Maven and Java: {reason}")
        yield broker.bootstrap


def _no_docker() -> str | None:
    """Why Docker cannot be used, or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import docker
        except ImportError as error:
            return str(error)
        try:
            with contextlib.closing(docker.from_env(timeout=5)) as client:
                client.ping()
        except (docker.errors.DockerException, OSError) as error:
            return f"no engine answers ({str(error).splitlines()[0]})"
        finally:
            # docker-py leaves the socket of a failed connection to the collector, which warns: here, not in a test.
            gc.collect()
    return None


@contextlib.contextmanager
def _kafka_in_docker() -> Iterator[str]:
    from tests.kafka.broker import answers, free_port

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from testcontainers.core.container import DockerContainer

        # Apache's own image: testcontainers' KafkaContainer knows Confluent's only. The port must be known before the
        # start, since the broker tells it to its clients.
        port = free_port()
        container = DockerContainer(_KAFKA_IMAGE).with_bind_ports(9092, port)
        for name, value in {
            "KAFKA_NODE_ID": "1",
            "KAFKA_PROCESS_ROLES": "broker,controller",
            "KAFKA_CONTROLLER_LISTENER_NAMES": "CONTROLLER",
            "KAFKA_CONTROLLER_QUORUM_VOTERS": "1@localhost:9093",
            "KAFKA_LISTENERS": "PLAINTEXT://:9092,CONTROLLER://:9093",
            "KAFKA_ADVERTISED_LISTENERS": f"PLAINTEXT://127.0.0.1:{port}",
            "KAFKA_LISTENER_SECURITY_PROTOCOL_MAP": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "KAFKA_OFFSETS_TOPIC_REPLICATION_FACTOR": "1",
            "KAFKA_TRANSACTION_STATE_LOG_REPLICATION_FACTOR": "1",
            "KAFKA_TRANSACTION_STATE_LOG_MIN_ISR": "1",
        }.items():
            container.with_env(name, value)
        container.start()
    try:
        deadline = time.monotonic() + _DOCKER_TIMEOUT_S
        while not answers(f"127.0.0.1:{port}"):
            if time.monotonic() > deadline:
                pytest.fail(f"{_KAFKA_IMAGE} does not answer after {_DOCKER_TIMEOUT_S:g} s")
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        container.stop()

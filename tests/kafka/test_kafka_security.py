"""Logins, certificates and ACLs, on a broker of Apache Kafka that insists on them."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import signal
import time
from pathlib import Path

import httpx
import pytest

from dynamo_es.cli.main import main
from dynamo_es.clock import SystemClock
from dynamo_es.errors import ConfigError
from dynamo_es.log.base import Entry, TopicConfig, TopicPartition
from dynamo_es.log.errors import LogError, LogUnavailable
from dynamo_es.log.kafka import KafkaLog
from dynamo_es.runtime.appender import topic_configs
from schemas.catalog import TOPICS
from schemas.codec import TopicCodec
from schemas.kv_events import KV_EVENTS, SourceRetired
from tests.kafka.broker import missing_tools
from tests.kafka.secure_broker import ROOT, Acl, Certificates, SecureBroker, allow
from tests.support.fleet import MODEL, Fleet
from tests.support.token_endpoint import CLIENT_ID, CLIENT_SECRET, TokenEndpoint, unsecured_token

pytestmark = pytest.mark.kafka

ROLES = ("worker", "frontend", "streams", "relay", "tool", "administrator")
PASSWORDS = {name: f"pa55-of-{name}" for name in (ROOT, "nobody", *ROLES)}
WRONG = "wr0ng-passw0rd"
KEY_PASSWORD = "k3y-passw0rd"
SECRETS = (*PASSWORDS.values(), WRONG, KEY_PASSWORD, CLIENT_SECRET)
# A refusal is told at once: not after a time-out, and not after many tries.
SOON_S = 4.0
ROW = re.compile(r"\| ([a-z, ]+) \| (topic|group)(, prefixed)? \| `([^`]+)` \| ([A-Z_, ]+) \|")


class Desk:
    """The broker, certificates and files, and URLs with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.certificates = Certificates(folder / "certificates")
        self.broker = SecureBroker(folder / "broker", self.certificates, PASSWORDS)
        self.certificate = self.certificates.client(ROOT)
        self.encrypted = self.certificates.client(ROOT, password=KEY_PASSWORD)
        self.strange = self.certificates.client(ROOT, strange=True)

    def file(self, name: str, content: str) -> Path:
        path = self.folder / name
        path.write_text(content + "\n")
        return path

    def sasl(self, mechanism: str, options: str, server: str | None = None) -> str:
        return (
            f"kafka://{server or self.broker.sasl}?security_protocol=SASL_SSL&sasl_mechanism={mechanism}"
            f"&ssl_cafile={self.certificates.authority}&{options}"
        )

    def password(self, mechanism: str = "SCRAM-SHA-512", user: str = ROOT, password: str | None = None) -> str:
        path = self.file(f"password-{user}", PASSWORDS[user] if password is None else password)
        return self.sasl(mechanism, f"sasl_plain_username={user}&sasl_password_file={path}")

    def token(self, content: str) -> str:
        return self.sasl("OAUTHBEARER", f"sasl_oauth_token_file={self.file('token', content)}")

    def mutual(self, options: str = "") -> str:
        return (
            f"kafka://{self.broker.mutual_tls}?security_protocol=SSL&ssl_cafile={self.certificates.authority}{options}"
        )

    def certified(self, files) -> str:
        return self.mutual(f"&ssl_certfile={files.certificate}&ssl_keyfile={files.key}")


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    if (reason := missing_tools()) is not None:
        pytest.skip(f"a broker with logins must be one of our own: {reason}")
    desk = Desk(tmp_path_factory.mktemp("secure"))
    desk.broker.start()
    yield desk
    desk.broker.stop()


@pytest.fixture(autouse=True)
async def _settled():
    """TLS says good-bye: aiokafka does not wait for it where a login failed, and the loop of a test ends at once."""
    yield
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(60):
        while any(
            getattr(item, "_sock", None) is not None and getattr(item, "_loop", None) is loop
            for item in gc.get_objects()
            if isinstance(item, asyncio.Transport)
        ):
            await asyncio.sleep(0.01)


@pytest.fixture
async def opened():
    """Opens logs and closes them at the end."""
    logs = []

    async def open_at(url, environment=None):
        log = KafkaLog.from_url(url, SystemClock(), environment or {})
        logs.append(log)
        await log.start()
        return log

    yield open_at
    for log in logs:
        await log.close()


@pytest.fixture
def endpoint():
    endpoint = TokenEndpoint()
    yield endpoint
    endpoint.close()


async def use(log, topic):
    """Administer, append and read."""
    await log.create_topics([TopicConfig(topic, 2, replication=1, retention_ms=3_600_000)])
    await log.alter_topic(TopicConfig(topic, 2, retention_ms=7_200_000))
    assert (await log.describe(topic)).retention_ms == 7_200_000
    position = await log.append(topic, Entry(b"value", b"key"))
    reader = log.reader({TopicPartition(topic, position.partition): 0})
    (records,) = (await reader.poll(timeout_s=10)).values()
    assert [record.value for record in records] == [b"value"]
    await reader.close()


def now_s():
    return int(time.time())


def fresh_token(name=ROOT):
    return unsecured_token(name, now_s=now_s())


LOGINS = {
    "SCRAM-SHA-256": lambda desk: (desk.password("SCRAM-SHA-256"), {}),
    "SCRAM-SHA-512": lambda desk: (desk.password("SCRAM-SHA-512"), {}),
    "PLAIN": lambda desk: (desk.password("PLAIN"), {}),
    "environment": lambda desk: (
        desk.sasl("SCRAM-SHA-512", "client_id=x"),
        {"DYN_ES_KAFKA_SASL_USERNAME": ROOT, "DYN_ES_KAFKA_SASL_PASSWORD": PASSWORDS[ROOT]},
    ),
    "token file": lambda desk: (desk.token(fresh_token()), {}),
    "certificate": lambda desk: (desk.certified(desk.certificate), {}),
    "encrypted key": lambda desk: (desk.certified(desk.encrypted), {"DYN_ES_KAFKA_SSL_KEY_PASSWORD": KEY_PASSWORD}),
    "encrypted key, password in a file": lambda desk: (
        desk.certified(desk.encrypted) + f"&ssl_key_password_file={desk.file('key-password', KEY_PASSWORD)}", {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", LOGINS)
async def test_who_has_the_right_credentials_can_do_everything(desk, opened, how):
    url, environment = LOGINS[how](desk)
    log = await opened(url, environment)
    assert not any(secret in shown for secret in SECRETS for shown in (log.url, repr(log._settings)))
    await use(log, f"right.{how.replace(' ', '-').replace(',', '')}")


async def test_tokens_of_an_endpoint_are_shared_by_all_connections(desk, opened, endpoint):
    endpoint.gives(fresh_token(), 3600)
    environment = {
        "DYN_ES_KAFKA_OAUTH_CLIENT_SECRET": CLIENT_SECRET, "DYN_ES_KAFKA_OAUTH_ALLOWED_URLS": endpoint.url,
    }  # fmt: skip
    quoted = endpoint.url.replace("?", "%3F").replace("=", "%3D")
    url = desk.sasl("OAUTHBEARER", f"sasl_oauth_token_url={quoted}&sasl_oauth_client_id={CLIENT_ID}")
    log = await opened(url, environment)
    await use(log, "right.endpoint")
    assert len(endpoint.asked) == 1
    assert CLIENT_SECRET not in log.url


REFUSALS = {
    "PLAIN": (lambda desk: desk.password("PLAIN", password=WRONG), "Invalid username or password"),
    "SCRAM-SHA-256": (lambda desk: desk.password("SCRAM-SHA-256", password=WRONG), "invalid credentials"),
    "SCRAM-SHA-512": (lambda desk: desk.password(password=WRONG), "invalid credentials"),
    "unknown user": (
        lambda desk: desk.password(password=WRONG).replace(f"username={ROOT}", "username=no"), "invalid credentials",
    ),
    "another user's token": (lambda desk: desk.token(unsecured_token(ROOT, now_s=1_000)), "invalid_token"),
    "no token at all": (lambda desk: desk.token("abc"), "invalid_token"),
    "no certificate": (lambda desk: desk.mutual(), "refuses this client's certificate, or that it has none"),
    "a stranger's certificate": (
        lambda desk: desk.certified(desk.strange), "refuses this client's certificate, or that it has none",
    ),
    "another host name": (
        lambda desk: desk.password().replace("localhost", "127.0.0.1"), "cannot trust Kafka at 127.0.0.1:.*IP address",
    ),
    "another authority": (
        lambda desk: desk.password().replace(str(desk.certificates.authority), str(desk.certificates.stranger)),
        "cannot trust Kafka at localhost:.*unable to get local issuer certificate",
    ),
    "the system's authorities": (
        lambda desk: desk.password().replace(f"&ssl_cafile={desk.certificates.authority}", ""), "cannot trust Kafka at",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", REFUSALS)
async def test_who_has_not_is_told_once_soon_and_clearly(desk, how, caplog):
    url, message = REFUSALS[how][0](desk), REFUSALS[how][1]
    caplog.set_level(logging.DEBUG)
    log = KafkaLog.from_url(url, SystemClock(), {})
    began = time.monotonic()
    with pytest.raises(LogError, match=message) as caught:
        await log.start()
    assert time.monotonic() - began < SOON_S
    assert not caught.value.retriable
    shown = str(caught.value) + repr(caught.value) + caplog.text
    assert not any(secret in shown for secret in SECRETS)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    await log.close()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda desk: f"kafka://{desk.broker.sasl}", "does it expect TLS|closed"),
        (lambda desk: desk.password().replace(desk.broker.sasl, desk.broker.bootstrap), "security_protocol=SASL_SSL"),
    ],
    ids=["in the clear to TLS", "TLS to a clear listener"],
)
async def test_another_protocol_is_told_soon(desk, how, message):
    log = KafkaLog.from_url(how(desk), SystemClock(), {})
    began = time.monotonic()
    with pytest.raises(LogUnavailable, match=message):
        await log.start()
    assert time.monotonic() - began < SOON_S
    await log.close()


def test_a_command_with_a_wrong_password_ends_in_one_line(desk, capsys):
    for words in (["topics", "list"], ["frontend", "--http-port", "0"], ["worker", "mock"]):
        began = time.monotonic()
        assert main([*words, "--log", desk.password(password=WRONG)]) == 2
        assert time.monotonic() - began < SOON_S
        out, err = capsys.readouterr()
        assert out == ""
        (line,) = (line for line in err.splitlines() if line.startswith("dynamo-es: "))
        assert "cannot log in to Kafka at localhost" in line
        assert not any(secret in err for secret in SECRETS)


async def test_an_encrypted_key_without_its_password_asks_nobody(desk):
    log = KafkaLog.from_url(desk.certified(desk.encrypted), SystemClock(), {})
    with pytest.raises(ConfigError, match="DYN_ES_KAFKA_SSL_KEY_PASSWORD or the option ssl_key_password_file"):
        await log.start()
    await log.close()


@pytest.mark.parametrize("login", ["PLAIN", "token"])
async def test_no_login_is_in_the_log_at_any_level(desk, opened, caplog, login):
    token = fresh_token()
    url = desk.password("PLAIN") if login == "PLAIN" else desk.token(token)
    caplog.set_level(logging.DEBUG)
    log = await opened(url)
    await use(log, f"quiet.{login}")
    # Connections that are made while the log is in use are logged, login and all.
    assert "SaslHandShakeRequest" in caplog.text
    assert "(login)" in caplog.text
    secrets = (*SECRETS, token, token[: len(token) // 2])
    assert not any(secret in caplog.text or secret.encode().hex() in caplog.text for secret in secrets)


async def test_a_password_that_is_changed_is_used_by_the_next_client(desk, opened):
    """A running process whose password became wrong says so, and goes on when its file is right again."""
    log = await opened(desk.password())
    await use(log, "renewed")
    desk.password(password=WRONG)
    log._appender._retire(log._appender._slot)
    began = time.monotonic()
    with pytest.raises(LogError, match="invalid credentials"):
        await log.append("renewed", Entry(b"v"))
    assert time.monotonic() - began < SOON_S
    desk.password()
    await log.append("renewed", Entry(b"v"))


def acls_of_the_readme(namespace):
    """What README.md lists, as ACLs; users are called after roles."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    section = text.split("<!-- acls: begin -->")[1].split("<!-- acls: end -->")[0]
    acls = [
        Acl(role, resource, name.replace("<namespace>", namespace), "prefixed" if prefixed else "literal", operation)
        for roles, resource, prefixed, name, operations in ROW.findall(section)
        for role in roles.split(", ")
        for operation in operations.split(", ")
    ]
    rows = [line for line in section.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(ROW.findall(section)) == len(rows) - 1
    assert {acl.user for acl in acls} == set(ROLES)
    return acls


@pytest.fixture(scope="module")
def ruled(desk):
    """A namespace with the README's ACLs; its topics are made by the administrator's command."""
    namespace = "ruled"
    asyncio.run(allow(desk.broker.bootstrap, acls_of_the_readme(namespace)))
    return namespace


@pytest.fixture(scope="module")
def applied(desk, ruled):
    url = desk.password(user="administrator")
    flags = ("--log", url, "--topic-namespace", ruled, "--topic-replication", "1")
    assert main(["topics", "apply", *flags]) == 0
    assert main(["topics", "apply", *flags, "--topic-retention", "requests=1d"]) == 0
    assert main(["topics", "check", *flags, "--topic-retention", "requests=1d"]) == 0
    return ruled


async def test_every_role_does_its_job_with_exactly_its_acls(desk, applied, tmp_path, opened):
    """A fleet of processes, each as the user of its role."""
    (tmp_path / "w").mkdir()
    (tmp_path / "f").mkdir()
    (tmp_path / "s").mkdir()
    (tmp_path / "r").mkdir()
    workers = Fleet(desk.password(user="worker"), tmp_path / "w", applied)
    frontends = Fleet(desk.password(user="frontend"), tmp_path / "f", applied)
    streams = Fleet(desk.password(user="streams"), tmp_path / "s", applied)
    relays = Fleet(desk.password(user="relay"), tmp_path / "r", applied)
    fleets = (frontends, workers, streams, relays)
    log = await opened(desk.password(user="tool"))
    try:
        processor, relay, _, _ = await asyncio.gather(
            streams.start_streams("--snapshot-interval", "1", "--state-flush-interval", "0.5"),
            relays.start("relay", "relay", "run", "--dc-id", "east"),
            frontends.frontend("--snapshot-interval", "1"),
            workers.worker(1),
        )
        await frontends.wait_workers(1)
        await relay.wait_ready()
        async with httpx.AsyncClient(base_url=frontends.base, timeout=60) as http:
            for _ in range(2):
                body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "word " * 80}]}
                assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
            health = (await http.get("/health")).text
        assert not any(secret in health for secret in SECRETS)
        # Written by: worker; frontend; both; worker; streams or frontend; streams; relay.
        wanted = ("kv-events", "requests", "registry", "forward-pass", "kv-snapshots", "aggregates", "dc-relay")
        async with asyncio.timeout(60):
            for name in wanted:
                while not any(limits.end for limits in (await log.bounds(f"{applied}.{name}")).values()):
                    await asyncio.sleep(0.1)
        assert processor.process.returncode is None
    finally:
        await asyncio.gather(*(fleet.close() for fleet in fleets))
    for fleet in fleets:
        for process in fleet.processes:
            said = process.log()
            assert "uthorization" not in said, said
            assert "Traceback" not in said, said
            assert not any(secret in said for secret in SECRETS)


async def test_a_frontend_may_retire_the_blocks_of_a_lost_worker(desk, applied, tmp_path, opened):
    """Whoever routes says so in ``kv-events``, for all."""
    (tmp_path / "w").mkdir()
    (tmp_path / "f").mkdir()
    workers = Fleet(desk.password(user="worker"), tmp_path / "w", applied)
    frontends = Fleet(desk.password(user="frontend"), tmp_path / "f", applied)
    log = await opened(desk.password(user="tool"))
    topic = KV_EVENTS.qualified(applied)
    limits = await log.bounds(topic)
    reader = log.reader({TopicPartition(topic, number): bounds.end for number, bounds in limits.items()})
    try:
        _, worker = await asyncio.gather(frontends.frontend(), workers.worker(1))
        await frontends.wait_workers(1)
        async with httpx.AsyncClient(base_url=frontends.base, timeout=60) as http:
            body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "word " * 80}]}
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        await worker.end(signal.SIGKILL)
        codec, retired = TopicCodec(KV_EVENTS), False
        async with asyncio.timeout(60):
            while not retired:
                batches = (await reader.poll(timeout_s=1.0)).values()
                values = [codec.decode(record.value, record.headers) for records in batches for record in records]
                retired = any(isinstance(event, SourceRetired) for value in values for event in value.events)
    finally:
        await reader.close()
        await asyncio.gather(workers.close(), frontends.close())


def test_a_tool_reads_and_writes_nothing(desk, applied, capsys):
    flags = ("--log", desk.password(user="tool"), "--topic-namespace", applied)
    assert main(["topics", "list", *flags]) == 0
    assert main(["topics", "read", "registry", *flags]) == 0
    assert main(["state", "show", "registry", *flags]) == 0
    assert main(["dead-letters", "list", *flags]) == 0
    assert capsys.readouterr().err == ""
    assert main(["topics", "apply", *flags, "--topic-retention", "requests=2d", "--topic-replication", "1"]) == 2
    assert "what its role needs (README.md, Kafka security)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("role", "forbidden"),
    [
        ("worker", ("requests", "kv-snapshots", "aggregates")),
        ("frontend", ("worker-load", "forward-pass", "aggregates")),
        ("streams", ("registry", "requests", "kv-events")),
        ("relay", ("requests", "kv-snapshots", "aggregates")),
        ("tool", tuple(spec.name for spec in TOPICS)),
        ("nobody", tuple(spec.name for spec in TOPICS)),
    ],
)
async def test_a_role_writes_nowhere_else(desk, applied, opened, role, forbidden):
    log = await opened(desk.password(user=role))
    for name in forbidden:
        began = time.monotonic()
        with pytest.raises(LogError, match=r"AuthorizationFailed.*what its role needs .README\.md") as caught:
            await log.append(f"{applied}.{name}", Entry(b"v", b"k"))
        assert not caught.value.retriable
        assert time.monotonic() - began < SOON_S


async def test_no_role_writes_in_another_namespace_or_makes_topics(desk, applied, opened):
    root = await opened(desk.password())
    await root.create_topics(topic_configs("other", 1))
    worker = await opened(desk.password(user="worker"))
    for name in ("registry", "kv-events"):
        with pytest.raises(LogError, match="TopicAuthorizationFailed"):
            await worker.append(f"other.{name}", Entry(b"v", b"k"))
    with pytest.raises(LogError, match=r"what its role needs .*topics are made by an administrator"):
        await worker.create_topics([TopicConfig(f"{applied}.new", 1, replication=1)])
    with pytest.raises(LogError, match="what its role needs"):
        await worker.alter_topic(TopicConfig(f"{applied}.registry", 1, compacted=True))
    assert sum(limits.end for limits in (await root.bounds("other.registry")).values()) == 0

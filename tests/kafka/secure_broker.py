"""A broker that asks who is there: TLS, mutual TLS, every SASL mechanism, and ACLs. For tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import trustme
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.protocol.admin import CreateAclsRequest
from cryptography.hazmat.primitives import serialization

from tests.kafka.broker import KafkaBroker

# May do everything, over every listener.
ROOT = "root"
HOST = "localhost"
_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
_MODULES = "org.apache.kafka.common.security"
# Kafka's numbers: ResourceType, PatternType, AclOperation, AclPermissionType.
RESOURCES = {"topic": 2, "group": 3, "cluster": 4}
PATTERNS = {"literal": 3, "prefixed": 4}
OPERATIONS = {
    "READ": 3, "WRITE": 4, "CREATE": 5, "DELETE": 6, "ALTER": 7, "DESCRIBE": 8, "DESCRIBE_CONFIGS": 10,
    "ALTER_CONFIGS": 11,
}  # fmt: skip
_ALLOW = 3


@dataclass(frozen=True, slots=True)
class ClientFiles:
    """PEM files of a client."""

    certificate: Path
    key: Path


class Certificates:
    """An authority, what it signed, and another authority that nobody trusts."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._authority = trustme.CA()
        self._stranger = trustme.CA()
        self.authority = folder / "authority.pem"
        self.stranger = folder / "stranger.pem"
        self._authority.cert_pem.write_to_path(str(self.authority))
        self._stranger.cert_pem.write_to_path(str(self.stranger))

    def broker_keystore(self, host: str) -> Path:
        """Key and certificate as Kafka reads them."""
        issued = self._authority.issue_cert(host)
        path = self._folder / "broker.pem"
        path.write_bytes(_pkcs8(issued) + b"".join(item.bytes() for item in issued.cert_chain_pems))
        return path

    def client(self, name: str, *, password: str | None = None, strange: bool = False) -> ClientFiles:
        """Files of a client that Kafka shall know as ``name``; ``strange``: signed by the other authority."""
        signer = self._stranger if strange else self._authority
        issued = signer.issue_cert(f"{name}.example", common_name=name)
        stem = f"{name}{'-encrypted' if password else ''}{'-strange' if strange else ''}"
        files = ClientFiles(self._folder / f"{stem}.crt", self._folder / f"{stem}.key")
        files.certificate.write_bytes(b"".join(item.bytes() for item in issued.cert_chain_pems))
        files.key.write_bytes(_pkcs8(issued, password))
        return files


def _pkcs8(issued: trustme.LeafCert, password: str | None = None) -> bytes:
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    encryption = serialization.BestAvailableEncryption(password.encode()) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


class SecureBroker(KafkaBroker):
    """Listeners: ``bootstrap`` in the clear for the tests' own administration (its user may do everything), ``sasl``
    and ``mutual_tls`` for what is tested. ``users``: passwords by name, for PLAIN and SCRAM.
    """

    listeners = 4

    def __init__(self, data_dir: Path, certificates: Certificates, users: Mapping[str, str]) -> None:
        super().__init__(data_dir)
        self._certificates = certificates
        self._users = dict(users)
        self._sasl_port, self._tls_port = self._ports[2:]

    @property
    def sasl(self) -> str:
        return f"{HOST}:{self._sasl_port}"

    @property
    def mutual_tls(self) -> str:
        return f"{HOST}:{self._tls_port}"

    def _settings(self) -> dict[str, str]:
        settings = super()._settings()
        clear, controller = settings["listeners"].split(",")
        jaas = {mechanism: f"{_MODULES}.{module} required{options};" for mechanism, module, options in self._logins()}
        return settings | {
            "listeners": f"{clear},SECURE://127.0.0.1:{self._sasl_port},MUTUAL://127.0.0.1:{self._tls_port},{controller}",
            "advertised.listeners": f"{settings['advertised.listeners']},SECURE://{self.sasl},MUTUAL://{self.mutual_tls}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURE:SASL_SSL,MUTUAL:SSL",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self._certificates.broker_keystore(HOST)),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self._certificates.authority),
            "listener.name.mutual.ssl.client.auth": "required",
            "listener.name.mutual.ssl.principal.mapping.rules": "RULE:^.*CN=([a-z]+).*$/$1/",
            "listener.name.secure.sasl.enabled.mechanisms": ",".join(_MECHANISMS),
            **{f"listener.name.secure.{name.lower()}.sasl.jaas.config": text for name, text in jaas.items()},
            "listener.name.secure.oauthbearer.sasl.server.callback.handler.class": f"{_MODULES}.oauthbearer.internals."
            "unsecured.OAuthBearerUnsecuredValidatorCallbackHandler",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": f"User:ANONYMOUS;User:{ROOT}",
            "auto.create.topics.enable": "false",
        }

    def _logins(self) -> list[tuple[str, str, str]]:
        plain = "".join(f' user_{name}="{password}"' for name, password in self._users.items())
        return [
            ("PLAIN", "plain.PlainLoginModule", plain),
            ("SCRAM-SHA-256", "scram.ScramLoginModule", ""),
            ("SCRAM-SHA-512", "scram.ScramLoginModule", ""),
            ("OAUTHBEARER", "oauthbearer.OAuthBearerLoginModule", ' unsecuredLoginStringClaim_sub="broker"'),
        ]

    def _format_arguments(self) -> list[str]:
        scram = [
            argument
            for name, password in self._users.items()
            for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512")
            for argument in ("--add-scram", f"{mechanism}=[name={name},password={password}]")
        ]
        return [*super()._format_arguments(), *scram]


@dataclass(frozen=True, slots=True)
class Acl:
    """Who may do what with which resource, from everywhere."""

    user: str
    resource: str
    name: str
    pattern: str
    operation: str


async def allow(bootstrap: str, acls: list[Acl]) -> None:
    """Create ACLs; raises AssertionError if the broker does not take one."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        for acl in acls:
            response = await admin._client.send(
                1,
                CreateAclsRequest(
                    RESOURCES[acl.resource], acl.name, PATTERNS[acl.pattern], f"User:{acl.user}", "*",
                    OPERATIONS[acl.operation], _ALLOW,
                ),
            )  # fmt: skip
            ((code, message),) = response.creation_responses
            assert code == 0, (acl, message)
    finally:
        await admin.close()

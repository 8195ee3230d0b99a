"""Options of Dynamo's frontend for what is done in another way here: taken, told about, or refused with the reason.

Scripts and container environments that were written for Dynamo set them. What changes nothing that anybody could rely
on is ignored; what its user counts on (encryption, another protocol) is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dynamo_es.config.options import option, options_of
from dynamo_es.config.text_checks import check_path
from dynamo_es.errors import ConfigError

_PLANE = "Taken and ignored"
_TCP_TLS = "is not there: processes talk over ZeroMQ here; encrypt that with --curve-key-file"
_REFUSED = {
    "kserve_grpc_server": "is not in this version; models are served over HTTP",
    **dict.fromkeys(
        ("tcp_cert", "tcp_key", "tcp_ca_cert", "tcp_client_cert", "tcp_client_key", "tcp_client_ca_cert"), _TCP_TLS
    ),
}


def _choice(flag: str, variable: str, choices: tuple[str, ...], what: str) -> Any:
    return option(None, flag=flag, env=variable, choices=choices, help=f"{_PLANE}: {what}.")


def _tls(name: str) -> Any:
    variable = name.replace("-", "_").upper()
    return option(
        None, flag=f"--tcp-tls-{name}-path", env=f"DYN_TCP_TLS_{variable}_PATH", check=check_path,
        help="Refused: processes talk over ZeroMQ; see --curve-key-file.",
    )  # fmt: skip


def _nats(name: str) -> Any:
    variable = name.replace("-", "_").upper()
    return option(
        None, flag=f"--nats-tls-{name}-path", env=f"NATS_TLS_{variable}_PATH", check=check_path,
        help=f"{_PLANE}: there is no NATS.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DynamoConfig:
    """Dynamo's options for what is done in another way."""

    discovery_backend: str | None = _choice(
        "--discovery-backend", "DYN_DISCOVERY_BACKEND", ("kubernetes", "etcd", "file", "mem"),
        "workers are found in the log (--log)",
    )  # fmt: skip
    request_plane: str | None = _choice(
        "--request-plane", "DYN_REQUEST_PLANE", ("nats", "tcp"), "requests go over ZeroMQ"
    )
    response_plane: str | None = _choice(
        "--response-plane", "DYN_RESPONSE_PLANE", ("tcp", "quic"), "answers come over ZeroMQ"
    )
    event_plane: str | None = _choice("--event-plane", "DYN_EVENT_PLANE", ("nats", "zmq"), "events go to the log")
    nats_ca_cert: str | None = _nats("ca-cert")
    nats_client_cert: str | None = _nats("client-cert")
    nats_client_key: str | None = _nats("client-key")
    nats_insecure: bool = option(
        False, flag="--nats-tls-insecure", env="NATS_TLS_INSECURE", help=f"{_PLANE}: there is no NATS."
    )
    tcp_cert: str | None = _tls("cert")
    tcp_key: str | None = _tls("key")
    tcp_ca_cert: str | None = _tls("ca-cert")
    tcp_client_cert: str | None = _tls("client-cert")
    tcp_client_key: str | None = _tls("client-key")
    tcp_client_ca_cert: str | None = _tls("client-ca-cert")
    kserve_grpc_server: bool = option(
        False, flag="--kserve-grpc-server", env="DYN_KSERVE_GRPC_SERVER", help="Refused: not in this version."
    )
    grpc_metrics_port: int | None = option(
        None, flag="--grpc-metrics-port", env="DYN_GRPC_METRICS_PORT", minimum=0, maximum=65_535,
        help=f"{_PLANE}: it belongs to --kserve-grpc-server.",
    )  # fmt: skip
    admission_control: str | None = _choice(
        "--admission-control", "DYN_ADMISSION_CONTROL", ("token-capacity", "none"),
        "see --active-decode-blocks-threshold and --router-queue-threshold",
    )  # fmt: skip
    enforce_disagg: bool = option(
        False, flag="--enforce-disagg", env="DYN_ENFORCE_DISAGG",
        help=f"{_PLANE}: a decode worker says itself what it needs.",
    )  # fmt: skip
    load_aware: bool = option(
        False, flag="--load-aware", env="DYN_ROUTER_LOAD_AWARE", help="Deprecated: the same as --router-mode kv."
    )


def check_refused(config: DynamoConfig) -> None:
    """Raises ``ConfigError`` for an option whose user counts on what is not there."""
    for item in options_of(DynamoConfig):
        if item.name in _REFUSED and getattr(config, item.name) not in (None, False):
            raise ConfigError(f"{item.spec.flag} ({item.spec.env}) {_REFUSED[item.name]}")


def ignored(config: DynamoConfig) -> list[str]:
    """What to tell about options that are set and change nothing."""
    return [
        f"{item.spec.flag} ({item.spec.env}) changes nothing: {item.spec.help.partition(': ')[2].rstrip('.')}"
        for item in options_of(DynamoConfig)
        if item.spec.help.startswith(_PLANE) and getattr(config, item.name) not in (None, False)
    ]

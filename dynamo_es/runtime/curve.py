"""Encryption of the request plane: one CURVE key pair for a fleet, known to all its processes and to nobody else."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.asyncio import AsyncioAuthenticator

from dynamo_es.errors import ConfigError

_DOMAIN = "fleet"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A key pair in Z85. The secret is never shown."""

    public: bytes
    secret: bytes = field(repr=False)


def load_curve_keys(path: str) -> CurveKeys:
    """Read a ``.key_secret`` file as ``zmq.auth.create_certificates`` writes it.

    Raises:
        ConfigError: It cannot be read or has no secret key.
    """
    try:
        public, secret = zmq.auth.load_certificate(Path(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--curve-key-file {path}: {error}; make one with "
            "python -c \"import zmq.auth; zmq.auth.create_certificates('.', 'fleet')\""
        ) from error
    if secret is None:
        raise ConfigError(f"--curve-key-file {path}: it has no secret key; use the .key_secret file")
    return CurveKeys(public, secret)


class FleetKeyProvider:
    """Admits exactly the fleet's own public key."""

    def __init__(self, keys: CurveKeys) -> None:
        self._allowed = keys.public

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with this Z85 public key may connect."""
        return zmq.utils.z85.encode(key) == self._allowed if len(key) == 32 else key == self._allowed


def start_authenticator(context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys) -> AsyncioAuthenticator:
    """Run ZAP on this context; stop it with ``stop``."""
    authenticator = AsyncioAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(_DOMAIN, FleetKeyProvider(keys))
    return authenticator


def secure_server(socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """Before bind."""
    socket.curve_server = True
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
    socket.zap_domain = _DOMAIN.encode()


def secure_client(socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """Before connect; the server must hold the same pair."""
    socket.curve_serverkey = keys.public
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret

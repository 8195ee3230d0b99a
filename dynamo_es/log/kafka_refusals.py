"""Why no broker can be used. aiokafka logs its reasons and raises without them, so each server is asked once more."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any

from aiokafka import errors as kafka
from aiokafka.conn import AIOKafkaConnection, create_conn
from aiokafka.protocol.admin import SaslAuthenticateRequest

from dynamo_es.log.errors import LogError, LogUnavailable
from dynamo_es.log.kafka_config import OAUTHBEARER, KafkaSettings
from dynamo_es.log.kafka_errors import AUTHENTICATION_ERRORS, map_kafka_error, raise_for_code
from dynamo_es.log.kafka_logging import quiet_aiokafka
from dynamo_es.log.kafka_tokens import TokenUnavailable

_ASK_TIMEOUT_S = 1.0
# RFC 7628, 3.2.3: a client says this to a server that refused its token, and then hears why.
_GO_ON = b"\x01"


async def explain_refusal(settings: KafkaSettings, arguments: Mapping[str, Any]) -> LogError:
    """The error to raise when nothing could be done with any server; says what is wrong and what to do.

    ``arguments``: of aiokafka's clients. Takes about a second at most. A refused login or certificate is not
    retriable: the same try would end the same way.
    """
    reasons = await asyncio.gather(*(_refusal(server, arguments) for server in settings.servers))
    login = f"log in to Kafka at {settings.bootstrap}"
    for reason in reasons:
        if isinstance(reason, AUTHENTICATION_ERRORS):
            return map_kafka_error(reason, login)
        if isinstance(reason, TokenUnavailable):
            return LogUnavailable(f"cannot {login}: {reason}")
        if isinstance(reason, ssl.SSLCertVerificationError):
            return LogError(
                f"cannot trust Kafka at {settings.bootstrap}: {reason.verify_message}; ssl_cafile must hold the "
                "authority that signed the brokers' certificates, and these must name the hosts as the URL does"
            )
        if isinstance(reason, ssl.SSLError) and "_ALERT_" in (reason.reason or ""):
            return LogError(
                f"Kafka at {settings.bootstrap} refuses this client's certificate, or that it has none: "
                f"{reason.reason}; check ssl_certfile and ssl_keyfile"
            )
    told = "; ".join(
        f"{server}: {str(reason) or type(reason).__name__}"
        for server, reason in zip(settings.servers, reasons, strict=True)
    )
    return LogUnavailable(
        f"no Kafka broker answers at {settings.bootstrap} within {settings.connect_timeout_ms} ms "
        f"({told}); check that the cluster runs, that the addresses and security_protocol="
        f"{settings.security_protocol} are right and that brokers advertise addresses this machine reaches"
    )


async def _refusal(server: str, arguments: Mapping[str, Any]) -> Exception | str:
    host, _, port = server.rpartition(":")
    wanted = {
        name: value for name, value in arguments.items() if name not in ("bootstrap_servers", "metadata_max_age_ms")
    }
    connection: AIOKafkaConnection | None = None
    try:
        with quiet_aiokafka():
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                connection = await create_conn(host.strip("[]"), int(port), **wanted)
                if wanted["sasl_mechanism"] == OAUTHBEARER:
                    await _hear_about_token(connection)
    except TimeoutError:
        return "no answer"
    except (OSError, kafka.KafkaError) as error:
        # What ended the connection while it was asked, where that is known.
        return error.__cause__ if isinstance(error.__cause__, ssl.SSLError) else error
    finally:
        if connection is not None:
            await asyncio.wait([connection.close()], timeout=_ASK_TIMEOUT_S)
    return "it takes connections, but answers no question about the cluster (does it expect TLS or a login?)"


async def _hear_about_token(connection: AIOKafkaConnection) -> None:
    """aiokafka takes any answer to a token for success. A broker that refused it says so when asked to go on."""
    response = await connection.send(SaslAuthenticateRequest(_GO_ON))
    if kafka.for_code(response.error_code) is kafka.SaslAuthenticationFailed:
        raise_for_code(response.error_code, str(response.error_message))

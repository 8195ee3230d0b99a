"""TLS handshakes that fail: counted by why, and told in the log now and then.

asyncio closes such a connection without a word, and the application never hears of it. ``SSLContext.sslobject_class``
is the documented place to look in. Connections that a client gives up before it said anything are none of these.
"""

from __future__ import annotations

import logging
import ssl
from collections import Counter

from dynamo_es.clock import Clock
from dynamo_es.runtime.metrics import Collector, Samples, counter

logger = logging.getLogger(__name__)

QUIET_S = 10.0
"""Time in which failures are told once at most: anybody may cause them."""
_REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "no_client_certificate",
    "CERTIFICATE_VERIFY_FAILED": "client_certificate_refused",
    "HTTP_REQUEST": "plain_http",
    "UNSUPPORTED_PROTOCOL": "protocol_version",
    "WRONG_VERSION_NUMBER": "protocol_version",
    "NO_SHARED_CIPHER": "no_shared_cipher",
}
_ALERT = "client_alert"
_OTHER = "other"
_TOLD = {
    "no_client_certificate": "the client sent no certificate (--tls-client-ca-cert-path)",
    "client_certificate_refused": "the client's certificate is not valid, or of no authority that is let in",
    "plain_http": "the client spoke HTTP without TLS",
    "protocol_version": "the client spoke no TLS, or a version below 1.2",
    "no_shared_cipher": "client and server have no cipher in common",
    _ALERT: "the client refused the server's certificate, or gave up",
}


class HandshakeWatch:
    """Watches the handshakes of server contexts. Belongs to one event loop.

    Attributes:
        failures: By reason, of a few.
    """

    def __init__(self, clock: Clock) -> None:
        self.failures: Counter[str] = Counter()
        self._clock = clock
        self._told_at: float | None = None
        self._untold = 0

    def over(self, context: ssl.SSLContext) -> ssl.SSLContext:
        """The same context, watched from now on."""
        note = self._note

        class WatchedObject(ssl.SSLObject):
            def do_handshake(self) -> None:
                try:
                    super().do_handshake()
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    raise
                except ssl.SSLError as error:
                    note(error)
                    raise

        context.sslobject_class = WatchedObject
        return context

    def _note(self, error: ssl.SSLError) -> None:
        reason = reason_of(error)
        self.failures[reason] += 1
        self._untold += 1
        now = self._clock.monotonic()
        if self._told_at is None or now - self._told_at >= QUIET_S:
            logger.warning(
                "%d TLS handshakes failed; the last: %s", self._untold, _TOLD.get(reason, error.reason or "not known")
            )
            self._told_at, self._untold = now, 0


def reason_of(error: ssl.SSLError) -> str:
    """One of a few words for why a handshake failed."""
    reason = error.reason or ""
    if "_ALERT_" in reason:
        return _ALERT
    return _REASONS.get(reason, _OTHER)


class HandshakeCollector(Collector):
    """``<prefix>_tls_handshake_failures_total{reason}``."""

    def __init__(self, watch: HandshakeWatch, prefix: str) -> None:
        self._watch = watch
        self._failures = counter(
            f"{prefix}_tls_handshake_failures_total", "TLS handshakes that did not succeed", "reason"
        )
        self.families = (self._failures,)

    def fill(self, samples: Samples) -> None:
        """As ``Collector.fill``."""
        for reason in (*dict.fromkeys(_REASONS.values()), _ALERT, _OTHER):
            samples.add(self._failures, self._watch.failures[reason], reason)

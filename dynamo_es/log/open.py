"""Opening an event log by its URL."""

from __future__ import annotations

import random
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from dynamo_es.clock import Clock
from dynamo_es.errors import ConfigError
from dynamo_es.log.base import EventLog
from dynamo_es.log.embedded import EmbeddedLog
from dynamo_es.log.embedded_layout import EmbeddedOptions
from dynamo_es.log.memory import MemoryLog

_FORMS = "embedded:///dir (one machine), kafka://host:port[,host:port], memory:// (this process only)"
_EMBEDDED_OPTIONS = ("durability", "segment_bytes", "segment_ms")
_MIN_SEGMENT_BYTES = 16_384


def open_log(url: str, clock: Clock, *, rng: random.Random | None = None) -> EventLog:
    """The event log that ``url`` names, not started yet.

    - ``embedded:///dir`` (absolute) or ``embedded:dir`` (relative): a folder on this machine. Options
      ``durability=os|fsync``, ``segment_bytes``, ``segment_ms``.
    - ``memory://`` or ``memory://name``: a new log in this process; the name is only a label.
    - ``kafka://host:port[,host:port]``: a Kafka cluster; for its options see ``dynamo_es.log.kafka``.

    Raises:
        ConfigError: Unknown scheme or option, or a value that is not accepted; says what is.
    """
    parts = urlsplit(url)
    if parts.scheme == "embedded":
        return _open_embedded(parts, clock, rng)
    if parts.scheme == "memory":
        _options(parts, ())
        return MemoryLog(unquote(parts.netloc), clock, rng)
    if parts.scheme == "kafka":
        from dynamo_es.log.kafka import KafkaLog

        return KafkaLog.from_url(url, clock)
    shown = f"scheme {parts.scheme!r}" if parts.scheme else "no scheme"
    raise ConfigError(f"log URL with {shown}: expected {_FORMS}")


def _open_embedded(parts: SplitResult, clock: Clock, rng: random.Random | None) -> EmbeddedLog:
    folder = unquote(parts.path)
    if parts.netloc:
        raise ConfigError(
            f"log URL embedded://{parts.netloc}{parts.path}: an absolute folder has three slashes "
            f"(embedded:///{parts.netloc}{parts.path}), a relative one has none (embedded:{parts.netloc}{parts.path})"
        )
    if not folder.strip("/"):
        raise ConfigError("log URL embedded: names no folder; expected embedded:///dir")
    found = _options(parts, _EMBEDDED_OPTIONS)
    defaults = EmbeddedOptions()
    durability = found.get("durability", defaults.durability)
    if durability not in ("os", "fsync"):
        raise ConfigError(f"log URL option durability={durability}: expected os or fsync")
    options = EmbeddedOptions(
        durability=durability,
        segment_bytes=_number(found, "segment_bytes", defaults.segment_bytes, _MIN_SEGMENT_BYTES, "bytes"),
        segment_ms=_number(found, "segment_ms", defaults.segment_ms, 1_000, "ms"),
    )
    return EmbeddedLog(Path(folder), clock, options=options, rng=rng)


def _options(parts: SplitResult, accepted: tuple[str, ...]) -> dict[str, str]:
    found = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(set(found) - set(accepted))
    if unknown:
        known = f"expected {', '.join(accepted)}" if accepted else "it takes none"
        raise ConfigError(f"log URL {parts.scheme}: unknown option {unknown[0]!r}; {known}")
    return found


def _number(found: dict[str, str], name: str, default: int, minimum: int, unit: str) -> int:
    text = found.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError as error:
        raise ConfigError(f"log URL option {name}={text}: expected a whole number ({unit})") from error
    if value < minimum:
        raise ConfigError(f"log URL option {name}={text}: must be at least {minimum} ({unit})")
    return value

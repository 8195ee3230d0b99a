"""Options of single commands of ``dynamo-es``, beside those of the fleet's processes (``dynamo_es.config.tree``)."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_es.config.log_filter import check_log_filter
from dynamo_es.config.options import option
from dynamo_es.config.points_in_time import check_since
from dynamo_es.config.text_checks import check_base_url, check_name, check_path
from dynamo_es.config.tree import LoggingConfig
from schemas.dead_letters import REASONS


@dataclass(frozen=True, slots=True)
class ToolLoggingConfig(LoggingConfig):
    """The same for commands that print what they were asked for: they are silent while all is well."""

    level: str = option(
        "warning", flag="--log-level", env="DYN_LOG", check=check_log_filter,
        help="As for the processes of a fleet, for example info or warning,dynamo_es.log=debug.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """``dynamo-es demo``."""

    workers: int = option(
        4, flag="--workers", env=None, unit="workers", minimum=1, maximum=64, help="Mock workers, a process each."
    )
    http_port: int = option(
        8000, flag="--http-port", env=None, minimum=0, maximum=65_535,
        help="Listen port of the frontend; a free one if that is in use.",
    )  # fmt: skip
    folder: str | None = option(
        None, flag="--dir", env=None, check=check_path,
        help="Folder for log and state, kept at the end; unset: a temporary one, removed at the end.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReadConfig:
    """``dynamo-es topics read``."""

    partition: int | None = option(
        None, flag="--partition", env=None, minimum=0, maximum=1_000_000, help="Only this partition; unset: all."
    )
    offset: int | None = option(
        None, flag="--offset", env=None, minimum=0, maximum=2**63 - 1,
        help="From this offset on; unset: the start. Offsets are counted by partition, so it needs --partition.",
    )  # fmt: skip
    max_records: int | None = option(
        None, flag="--max-records", env=None, unit="records", minimum=1, maximum=2**63 - 1,
        help="Stop after so many records; unset: at the present end, with --follow never.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LettersConfig:
    """``dynamo-es dead-letters``: which letters."""

    topic: str | None = option(
        None, flag="--topic", env=None, check=check_name,
        help="Only records of this topic (its name with or without the namespace), or of this source.",
    )  # fmt: skip
    reason: str | None = option(
        None, flag="--reason", env=None, choices=REASONS, help="Only records that were refused for this reason."
    )
    since: str | None = option(
        None, flag="--since", env=None, check=check_since,
        help="Only letters that are not older: an age (90min, 24h, 7d) or a time (2026-05-01T12:00:00Z).",
    )  # fmt: skip
    max_letters: int | None = option(
        None, flag="--max-letters", env=None, unit="letters", minimum=1, maximum=1_000_000,
        help="At most so many, the newest ones; unset: 50 to list, all to retry.",
    )  # fmt: skip


def check_url(text: str) -> None:
    """A frontend's address."""
    check_base_url(text, "--api-key-file")


@dataclass(frozen=True, slots=True)
class DiagnoseConfig:
    """``dynamo-es diagnose``: whom to ask."""

    url: str | None = option(
        None, flag="--url", env=None, check=check_url,
        help="A frontend to ask (its /health), http://host:8000; unset: the log is asked alone.",
    )  # fmt: skip
    model: str | None = option(None, flag="--model", env=None, check=check_name, help="Only this model; unset: all.")
    since: str = option(
        "15min", flag="--since", env=None, check=check_since,
        help="Decisions in the log that count: an age (15min, 2h) or a time (2026-05-01T12:00:00Z).",
    )  # fmt: skip
    timeout_s: float = option(
        60.0, flag="--timeout", env=None, unit="s", minimum=0.1, maximum=3600,
        help="How long the frontend, and then the log, may take to tell.",
    )  # fmt: skip
    api_key_file: str | None = option(
        None, flag="--api-key-file", env=None, check=check_path,
        help="File with a key of the frontend, one line, if it wants one for /health (--api-keys-for-probes).",
    )  # fmt: skip
    ca_cert_path: str | None = option(
        None, flag="--ca-cert-path", env=None, check=check_path,
        help="Authorities of the frontend's certificate (PEM); unset: the system's.",
    )  # fmt: skip

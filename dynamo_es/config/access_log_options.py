"""Options of the frontend's access log."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_es.config.options import option
from dynamo_es.config.text_checks import check_path


@dataclass(frozen=True, slots=True)
class AccessLogConfig:
    """One line of JSON for each HTTP request; ``dynamo_es.frontend.access_log`` says what is in it."""

    path: str | None = option(
        None, flag="--access-log", env="DYN_ES_ACCESS_LOG", check=check_path,
        help="File to which a line of JSON is appended for each HTTP request, when it is over; - is standard output. A "
        "file that was moved away is made anew. Unset: no access log.",
    )  # fmt: skip
    queue: int = option(
        20_000, flag="--access-log-queue", env="DYN_ES_ACCESS_LOG_QUEUE", unit="lines", minimum=1, maximum=10_000_000,
        help="Lines that may wait to be written; what does not fit is dropped and counted, and no request waits.",
    )  # fmt: skip

"""What options that are text accept. Each check raises ValueError that says what is expected. Pure: no I/O."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import unquote, urlsplit

# Leaves room for the longest topic name behind it: Kafka's limit is 249 in all.
_TOPIC_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,200}")
_HOST_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_METRIC_NAME = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")
_ENDPOINT = re.compile(r"(dyn://)?[^\s./]+\.[^\s./]+\.[^\s./]+")
_HEADER_PREFIX = re.compile(r"[a-z][a-z0-9-]{0,99}")
_MAX_NAME = 256
_MOCK_TYPES = ("Chat", "Completions", "Embedding")
_HTTP_PATH = re.compile(r"(/[A-Za-z0-9._~!$&'()+,;=@-]+)+")
_SECRETS = re.compile(r"((?:username|password|secret|token)=)[^&\s]*|(?<=://)[^/?#]*@", re.IGNORECASE)


def check_host(text: str) -> None:
    """A host name or an IP address; syntax only."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        labels = text.removesuffix(".").split(".")
        if len(text) > 253 or not all(_HOST_LABEL.fullmatch(label) for label in labels):
            raise ValueError("expected a host name or an IP address, without scheme and port") from None


def check_topic_namespace(text: str) -> None:
    """Kafka's rule for topic names, so that topics can move between backends."""
    if not _TOPIC_NAMESPACE.fullmatch(text):
        raise ValueError("expected 1 to 200 of a-z, A-Z, 0-9, '.', '_' and '-'")


def check_name(text: str) -> None:
    """A name that people type: a model's, for one."""
    if len(text) > _MAX_NAME or text != text.strip():
        raise ValueError(f"expected a name of at most {_MAX_NAME} characters, without spaces around it")


def check_model_names(text: str) -> None:
    """Names joined by commas."""
    for name in text.split(","):
        if not name.strip():
            raise ValueError("expected names joined by commas")
        check_name(name.strip())


def check_namespace(text: str) -> None:
    """One part of an endpoint's path."""
    if re.search(r"[\s./]", text):
        raise ValueError("expected the first part of an endpoint's path, without '.', '/' and spaces")


def check_endpoint(text: str) -> None:
    """An endpoint's path."""
    if not _ENDPOINT.fullmatch(text):
        raise ValueError("expected namespace.component.endpoint")


def check_metrics_prefix(text: str) -> None:
    """Prometheus's rule for names."""
    if not _METRIC_NAME.fullmatch(text):
        raise ValueError("expected a letter or '_', then letters, digits, '_' and ':'")


def check_path(text: str) -> None:
    """A path; whether it can be used is seen where it is used."""
    if text.startswith("~"):
        raise ValueError("the shell did not expand '~' here; write $HOME instead")


def check_web_url(text: str) -> None:
    """The URL of a server of HTTP, without a name and a password."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ValueError("expected a URL like http://collector:4318/v1/traces")


def check_header_prefix(text: str) -> None:
    """The beginning of the names of HTTP headers; they are compared in lower case."""
    if not _HEADER_PREFIX.fullmatch(text):
        raise ValueError("expected lower-case letters, digits and '-', like x-dynamo-meta-")


def check_word(text: str) -> None:
    """Something without white space."""
    if re.search(r"\s", text):
        raise ValueError("expected no white space")


def check_http_path(text: str) -> None:
    """The path of a route: segments without parameters, no slash at the end."""
    if not _HTTP_PATH.fullmatch(text):
        raise ValueError("expected a path like /v1/chat/completions, without parameters and without a slash at the end")


def model_type_of(text: str) -> str:
    """What a mock worker serves, as model cards say it: ``chat,embedding`` is ``Chat | Embedding``.

    Raises:
        ValueError: An unknown name, or none.
    """
    asked = {name.strip().lower() for name in re.split(r"[|,]", text)}
    if not asked <= {name.lower() for name in _MOCK_TYPES}:
        raise ValueError(f"expected one or more of {', '.join(_MOCK_TYPES)}, joined by '|' or ','")
    return " | ".join(name for name in _MOCK_TYPES if name.lower() in asked)


def check_model_type(text: str) -> None:
    """See ``model_type_of``."""
    model_type_of(text)


def check_base_url(text: str, key_option: str) -> None:
    """An address of HTTP without secrets in it; ``key_option``: where a key belongs instead."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError("expected a URL like http://127.0.0.1:8000")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError(f"expected scheme, host, port and path only; a key belongs into {key_option}")


def check_log_url(text: str) -> None:
    """What any log's URL must be; the rest of its syntax belongs to the backends."""
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise ValueError(f"not a URL: {error}") from error
    if not parts.scheme:
        example = f"embedded://{text}" if text.startswith("/") else "embedded:///dir"
        raise ValueError(f"a log is named by a URL: {example} (one machine) or kafka://host:port[,host:port]")
    if parts.fragment:
        raise ValueError("a log's URL has no part behind '#'; write %23 for a '#' in a folder's name")
    if parts.scheme == "embedded":
        if parts.netloc.startswith("~") or parts.path.lstrip("/").startswith("~"):
            raise ValueError("nobody expands '~' in a URL; write embedded://$HOME/dir")
        if "\0" in unquote(parts.path):
            raise ValueError("a folder's name has no null byte")


def without_secrets(text: str) -> str:
    """``text`` with passwords and user names of URLs as ``***``."""
    return _SECRETS.sub(lambda match: f"{match[1] or ''}***{'' if match[1] else '@'}", text)

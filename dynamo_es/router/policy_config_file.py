"""Reading the file of ``router_policy_config``. Blocks; done once, when a router is configured."""

from __future__ import annotations

from dataclasses import replace

from dynamo_es.router.config_settings import KvRouterSettings, check_settings
from dynamo_es.router.policy_config import PolicyConfig
from dynamo_es.router.policy_config_nodes import DocumentRefusal
from dynamo_es.router.policy_config_rules import PolicyRefusal
from dynamo_es.router.policy_config_yaml import parse_policy_config

MAX_BYTES = 256 * 1024
"""Of a policy file: room for a thousand classes."""


def read_policy_config(path: str) -> PolicyConfig:
    """The policy configuration in a file.

    Raises:
        ValueError: It cannot be read, is no such document, or contradicts itself; names the path, and the place in it.
    """
    text = _read_text(path)
    try:
        return parse_policy_config(text)
    except DocumentRefusal as error:
        raise ValueError(f"failed to parse router policy config {path}: {error}") from error
    except PolicyRefusal as error:
        raise ValueError(f"invalid router policy config: {error}") from error


def with_policy(settings: KvRouterSettings) -> KvRouterSettings:
    """``settings`` with what the file ``router_policy_config`` says; the same if there is none.

    The ``router`` section of the file wins over what the settings said before.

    Raises:
        ValueError: The file cannot be used, or its ``router`` section makes the settings bad.
    """
    if settings.router_policy_config is None:
        return settings
    try:
        policy = read_policy_config(settings.router_policy_config)
        return check_settings(replace(settings, policy=policy, **policy.router))
    except ValueError as error:
        raise ValueError(f"router_policy_config: {error}") from error


def _read_text(path: str) -> str:
    failed = f"failed to read router policy config {path}: "
    if "\0" in path:
        raise ValueError(f"{failed}file name contained an unexpected NUL byte")
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{failed}{error.strerror} (os error {error.errno})") from error
    if len(data) > MAX_BYTES:
        raise ValueError(f"{failed}it is larger than {MAX_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{failed}stream did not contain valid UTF-8") from error

"""How an option is declared, and how flags and the environment become a configuration.

An option is a field of a frozen dataclass, made with ``option``: default, flag, environment variable, unit and help
stand in one place. A flag beats the environment, the environment beats the default. Nothing is read at import.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from dynamo_es.errors import ConfigError

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """Everything about one option but its value.

    Attributes:
        flag: Command-line flag, ``--http-port``.
        env: Environment variable; Dynamo's where Dynamo has the option.
        help: One sentence.
        unit: ``s``, ``ms``, ``bytes``, ``tokens``, ... or None.
        choices: Accepted values, or None.
        secret: Shown as ``***``.
        minimum, maximum: Inclusive bounds of a number.
    """

    flag: str
    env: str | None
    help: str
    unit: str | None = None
    choices: tuple[str, ...] | None = None
    secret: bool = False
    minimum: float | None = None
    maximum: float | None = None


def option(
    default: Any,
    *,
    flag: str,
    env: str | None,
    help: str,  # noqa: A002 - argparse's name
    unit: str | None = None,
    choices: Sequence[str] | None = None,
    secret: bool = False,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """Declare an option: the field's default with its description."""
    spec = OptionSpec(flag, env, help, unit, tuple(choices) if choices else None, secret, minimum, maximum)
    return dataclasses.field(default=default, metadata={"option": spec})


@dataclass(frozen=True, slots=True)
class Option:
    """A declared option with its field name, type and default."""

    name: str
    type: Any
    default: Any
    spec: OptionSpec


def options_of(config: type) -> Iterator[Option]:
    """The options of a configuration class, in order."""
    hints = get_type_hints(config)
    for field in dataclasses.fields(config):
        spec = field.metadata.get("option")
        if spec is not None:
            yield Option(field.name, hints[field.name], field.default, spec)


def add_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """Add one flag for each option; a boolean also has ``--no-…``. Values stay text until ``load``."""
    group = parser.add_argument_group(config.__name__.removesuffix("Config").lower() + " options")
    for item in options_of(config):
        text = item.spec.help + _help_tail(item)
        destination = f"{config.__name__}.{item.name}"
        if _base_type(item.type) is bool:
            group.add_argument(
                item.spec.flag, dest=destination, action=argparse.BooleanOptionalAction, default=None, help=text
            )
        else:
            metavar = "|".join(item.spec.choices) if item.spec.choices else (item.spec.unit or "VALUE").upper()
            group.add_argument(item.spec.flag, dest=destination, default=None, metavar=metavar, help=text)


def load(config: type[T], flags: argparse.Namespace | None, env: Mapping[str, str]) -> T:
    """Build a configuration from parsed flags and an environment.

    Raises:
        ConfigError: A value is of the wrong type, not among the choices, or out of bounds; names flag or variable.
    """
    values: dict[str, Any] = {}
    for item in options_of(config):
        raw = getattr(flags, f"{config.__name__}.{item.name}", None) if flags is not None else None
        source = item.spec.flag
        if raw is None and item.spec.env and item.spec.env in env:
            raw, source = env[item.spec.env], item.spec.env
        if raw is not None:
            values[item.name] = _parse(item, raw, source)
    return config(**values)


def origins(config: type, flags: argparse.Namespace | None, env: Mapping[str, str]) -> Mapping[str, str]:
    """Where each option's value comes from: its flag, its variable, or ``default``."""
    result = {}
    for item in options_of(config):
        if flags is not None and getattr(flags, f"{config.__name__}.{item.name}", None) is not None:
            result[item.name] = item.spec.flag
        elif item.spec.env and item.spec.env in env:
            result[item.name] = item.spec.env
        else:
            result[item.name] = "default"
    return result


def redacted(config: Any) -> Mapping[str, Any]:
    """Values of a configuration, secrets as ``***``."""
    return {
        item.name: "***" if item.spec.secret and getattr(config, item.name) else getattr(config, item.name)
        for item in options_of(type(config))
    }


def reference(configs: Sequence[type]) -> str:
    """A Markdown table of all options, for the README."""
    lines = ["| Flag | Environment | Default | Unit | Meaning |", "|---|---|---|---|---|"]
    for config in configs:
        for item in options_of(config):
            default = "–" if item.default is None or item.default == "" else f"`{_text(item.default)}`"
            env = f"`{item.spec.env}`" if item.spec.env else "–"
            meaning = item.spec.help
            if item.spec.choices:
                meaning += f" One of {', '.join(f'`{choice}`' for choice in item.spec.choices)}."
            lines.append(f"| `{item.spec.flag}` | {env} | {default} | {item.spec.unit or ''} | {meaning} |")
    return "\n".join(lines)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _help_tail(item: Option) -> str:
    parts = []
    if item.spec.unit:
        parts.append(f"unit {item.spec.unit}")
    if item.default not in (None, ""):
        parts.append(f"default {_text(item.default)}")
    if item.spec.env:
        parts.append(f"env {item.spec.env}")
    return f" [{'; '.join(parts)}]".replace("%", "%%") if parts else ""


def _base_type(hint: Any) -> Any:
    if get_origin(hint) is None:
        return hint
    members = [member for member in get_args(hint) if member is not type(None)]
    return members[0] if len(members) == 1 else str


def _parse(item: Option, raw: Any, source: str) -> Any:
    kind = _base_type(item.type)
    optional = type(None) in get_args(item.type)
    if isinstance(raw, str) and optional and raw.strip().lower() in ("", "none"):
        return None
    if kind is bool:
        return raw if isinstance(raw, bool) else _parse_bool(raw, source)
    if kind in (int, float):
        return _parse_number(item, kind, raw, source)
    if item.spec.choices and raw not in item.spec.choices:
        raise ConfigError(f"{source}={raw}: expected one of {', '.join(item.spec.choices)}")
    return raw


def _parse_bool(raw: str, source: str) -> bool:
    word = raw.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ConfigError(f"{source}={raw}: expected one of true/false, 1/0, on/off, yes/no")


def _parse_number(item: Option, kind: Callable[[str], float], raw: str, source: str) -> float:
    try:
        value = kind(raw)
    except ValueError as error:
        raise ConfigError(f"{source}={raw}: expected a number{_in_unit(item)}") from error
    low, high = item.spec.minimum, item.spec.maximum
    if math.isnan(value) or (low is not None and value < low) or (high is not None and value > high):
        bounds = f"at least {low:g}" if high is None else f"between {low or 0:g} and {high:g}"
        raise ConfigError(f"{source}={raw}: must be {bounds}{_in_unit(item)}")
    return value


def _in_unit(item: Option) -> str:
    return f" ({item.spec.unit})" if item.spec.unit else ""

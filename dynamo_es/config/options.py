"""How an option is declared, and how flags and the environment become a configuration.

An option is a field of a frozen dataclass, made with ``option``: default, flag, environment variable, unit, bounds and
help stand in one place. A flag beats the environment, the environment beats the default; an empty variable counts as
unset, an empty flag is a mistake. Nothing is read at import.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from dynamo_es.config.text_checks import without_secrets
from dynamo_es.errors import ConfigError

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
_MAX_SHOWN = 200
_NOTHING: tuple[Any, ...] = (None, "", ())
"""Defaults that are not shown."""
Check = Callable[[str], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """Everything about one option but its value.

    Attributes:
        flag: Command-line flag, ``--http-port``.
        env: Environment variable; Dynamo's where Dynamo has the option. None: a command's own, flag only.
        help: One sentence.
        unit: ``s``, ``ms``, ``bytes``, ``tokens``, ... or None.
        choices: Accepted values, or None.
        planned: Values that Dynamo has and this version has not; refused with the choices that there are.
        secret: Shown as ``***``.
        minimum, maximum: Inclusive bounds of a number; every number has both.
        check: For text; raises ValueError that says what is expected.
        aliases: Other flags for the same, ``-i``.
        many: A tuple: the flag may be repeated, the variable has the values with white space between them.
    """

    flag: str
    env: str | None
    help: str
    unit: str | None = None
    choices: tuple[str, ...] | None = None
    planned: tuple[str, ...] = ()
    secret: bool = False
    minimum: float | None = None
    maximum: float | None = None
    check: Check | None = None
    aliases: tuple[str, ...] = ()
    many: bool = False


def option(
    default: Any,
    *,
    flag: str,
    env: str | None,
    help: str,  # noqa: A002 - argparse's name
    unit: str | None = None,
    choices: Sequence[str] | None = None,
    planned: Sequence[str] = (),
    secret: bool = False,
    minimum: float | None = None,
    maximum: float | None = None,
    check: Check | None = None,
    aliases: Sequence[str] = (),
    many: bool = False,
) -> Any:
    """Declare an option: the field's default with its description."""
    spec = OptionSpec(
        flag, env, help, unit, tuple(choices) if choices else None, tuple(planned), secret, minimum, maximum, check,
        tuple(aliases), many,
    )  # fmt: skip
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
    words = re.sub(r"(?<!^)(?=[A-Z])", " ", config.__name__.removesuffix("Config")).lower()
    group = parser.add_argument_group(f"{words} options")
    for item in options_of(config):
        text = item.spec.help + _help_tail(item)
        destination = f"{config.__name__}.{item.name}"
        if _base_type(item.type) is bool:
            names = (*item.spec.aliases, item.spec.flag)
            group.add_argument(*names, dest=destination, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            metavar = "|".join(item.spec.choices) if item.spec.choices else (item.spec.unit or "VALUE").upper()
            names, action = (item.spec.flag, *item.spec.aliases), "append" if item.spec.many else "store"
            group.add_argument(*names, dest=destination, action=action, default=None, metavar=metavar, help=text)


def load(config: type[T], flags: argparse.Namespace | None, env: Mapping[str, str]) -> T:
    """Build a configuration from parsed flags and an environment.

    Raises:
        ConfigError: A value is of the wrong type, not among the choices, or out of bounds; names flag or variable.
    """
    values: dict[str, Any] = {}
    for item in options_of(config):
        raw, source = _find(config, item, flags, env)
        if isinstance(raw, list) or (item.spec.many and isinstance(raw, str)):
            parts = raw if isinstance(raw, list) else raw.split()
            values[item.name] = tuple(_parse(item, part, source) for part in parts)
        elif raw is not None:
            values[item.name] = _parse(item, raw, source)
    return config(**values)


def origins(config: type, flags: argparse.Namespace | None, env: Mapping[str, str]) -> Mapping[str, str]:
    """Where each option's value comes from: its flag, its variable, or ``default``."""
    return {item.name: _find(config, item, flags, env)[1] for item in options_of(config)}


def redacted(config: Any) -> Mapping[str, Any]:
    """Values of a configuration, secrets as ``***``, also those within a URL."""
    values: dict[str, Any] = {}
    for item in options_of(type(config)):
        value = getattr(config, item.name)
        if item.spec.secret and value:
            value = "***"
        values[item.name] = _without_secrets(value)
    return values


def arguments_of(flags: argparse.Namespace, configs: Sequence[type]) -> list[str]:
    """The command line that ``flags`` came from, as far as these configurations go."""
    line: list[str] = []
    for config in configs:
        for item in options_of(config):
            raw = getattr(flags, f"{config.__name__}.{item.name}", None)
            if isinstance(raw, bool):
                line.append(item.spec.flag if raw else item.spec.flag.replace("--", "--no-", 1))
            elif raw is not None:
                # One word: a value may begin with a dash.
                line += [f"{item.spec.flag}={value}" for value in (raw if isinstance(raw, list) else [raw])]
    return line


def reference(configs: Sequence[type]) -> str:
    """A Markdown table of all options, for the README."""
    lines = ["| Flag | Environment | Default | Unit | Accepts | Meaning |", "|---|---|---|---|---|---|"]
    for config in configs:
        for item in options_of(config):
            spec = item.spec
            default = "–" if item.default in _NOTHING else f"`{_text(item.default)}`"
            env = f"`{spec.env}`" if spec.env else "–"
            accepts = ", ".join(f"`{choice}`" for choice in spec.choices) if spec.choices else _range(item)
            meaning = spec.help
            if spec.planned:
                meaning += f" Not in this version: {', '.join(f'`{choice}`' for choice in spec.planned)}."
            flags = ", ".join(f"`{flag}`" for flag in (spec.flag, *spec.aliases))
            lines.append(f"| {flags} | {env} | {default} | {spec.unit or ''} | {accepts} | {meaning} |")
    return "\n".join(lines)


def _find(
    config: type, item: Option, flags: argparse.Namespace | None, env: Mapping[str, str]
) -> tuple[str | bool | list[str] | None, str]:
    """The value that was given, and by what; None and ``default`` if none was."""
    raw = getattr(flags, f"{config.__name__}.{item.name}", None) if flags is not None else None
    if raw is not None:
        return raw, item.spec.flag
    name = item.spec.env
    if name is not None and env.get(name, "").strip():
        return env[name], name
    return None, "default"


def _without_secrets(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_without_secrets(part) for part in value)
    return without_secrets(value) if isinstance(value, str) else value


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _range(item: Option) -> str:
    low, high = item.spec.minimum, item.spec.maximum
    return "" if low is None or high is None else f"{_number(low)} to {_number(high)}"


def _help_tail(item: Option) -> str:
    parts = []
    if item.spec.planned:
        parts.append(f"not in this version: {', '.join(item.spec.planned)}")
    if item.spec.unit:
        parts.append(f"unit {item.spec.unit}")
    if _range(item):
        parts.append(_range(item))
    if item.default not in _NOTHING:
        parts.append(f"default {_text(item.default)}")
    if item.spec.env:
        parts.append(f"env {item.spec.env}")
    return f" [{'; '.join(parts)}]".replace("%", "%%") if parts else ""


def _base_type(hint: Any) -> Any:
    if get_origin(hint) is None:
        return hint
    members = [member for member in get_args(hint) if member is not type(None)]
    return members[0] if len(members) == 1 else str


def _parse(item: Option, raw: str | bool, source: str) -> Any:
    if isinstance(raw, bool):
        return raw
    if not raw.strip():
        raise ConfigError(f"{source}: the value is empty; leave it out for the default")
    if type(None) in get_args(item.type) and raw.strip().lower() == "none":
        return None
    kind = _base_type(item.type)
    if kind is bool:
        return _parse_bool(item, raw, source)
    if kind in (int, float):
        return _parse_number(item, kind, raw, source)
    return _parse_text(item, raw, source)


def _parse_text(item: Option, raw: str, source: str) -> str:
    spec = item.spec
    if raw in spec.planned:
        raise ConfigError(
            f"{source}={raw} is not available in this version; use one of {', '.join(spec.choices or ())}"
        )
    if spec.choices and raw not in spec.choices:
        raise _wrong(item, raw, source, f"expected one of {', '.join(spec.choices)}")
    if not raw.isprintable():
        raise _wrong(item, raw, source, "expected text without control characters")
    if spec.check is not None:
        try:
            spec.check(raw)
        except ValueError as error:
            raise _wrong(item, raw, source, str(error)) from error
    return raw


def _parse_bool(item: Option, raw: str, source: str) -> bool:
    word = raw.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise _wrong(item, raw, source, "expected one of true/false, 1/0, on/off, yes/no")


def _parse_number(item: Option, kind: type[int] | type[float], raw: str, source: str) -> float:
    unit = f" ({item.spec.unit})" if item.spec.unit else ""
    try:
        value = kind(raw)
    except ValueError as error:
        whole = "a whole number" if kind is int else "a number"
        raise _wrong(item, raw, source, f"expected {whole}{unit}") from error
    low, high = item.spec.minimum, item.spec.maximum
    if math.isnan(value) or (low is not None and value < low) or (high is not None and value > high):
        bounds = f"at least {_number(low or 0)}" if high is None else f"between {_number(low or 0)} and {_number(high)}"
        raise _wrong(item, raw, source, f"must be {bounds}{unit}")
    return value


def _wrong(item: Option, raw: str, source: str, expected: str) -> ConfigError:
    return ConfigError(f"{source}={_shown(item, raw)}: {expected}")


def _shown(item: Option, raw: str) -> str:
    """A value as it may be shown: short, printable, without secrets."""
    if item.spec.secret:
        return "***"
    text = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in without_secrets(raw))
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"

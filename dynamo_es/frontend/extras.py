"""Libraries that are extras of this package: imported where they are used, with an error that names the extra."""

from __future__ import annotations

import importlib
from types import ModuleType

from dynamo_es.errors import ConfigError

_INSTEAD = "another --dyn-chat-processor"


class MissingExtra(ConfigError):
    """What was asked for needs a library that is not installed. ``instead``: what can be chosen without it.

    Attributes:
        extra: Name of the extra that brings it.
    """

    def __init__(self, extra: str, module: str, instead: str = _INSTEAD) -> None:
        super().__init__(
            f"{module} cannot be imported: it is of the extra {extra!r}; install it (pip install 'dynamo-es[{extra}]', "
            f"or pip install {extra} beside dynamo-es), or choose {instead}"
        )
        self.extra = extra


def import_extra(module: str, extra: str, instead: str = _INSTEAD) -> ModuleType:
    """A module of an extra; ``instead``: what can be chosen without it.

    Raises:
        MissingExtra: It is not installed, or does not run on this machine.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(extra, module, instead) from error

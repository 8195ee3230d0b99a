"""Routes that other packages add to the frontend (spec/frontend.md 8.2): what they are made of, and how they are found.

A provider is a function without arguments that returns ``FrontendRoute`` objects. It is named by an entry point of the
group ``dynamo.frontend.routes``, or as ``module:function``. Extensions are trusted: they run in this process.
"""

from __future__ import annotations

import importlib
import inspect
import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from importlib.metadata import EntryPoint, entry_points
from typing import Any

GROUP = "dynamo.frontend.routes"
_STATUSES = range(100, 1000)
_MAX_U16 = 65_535


class FrontendExtensionContext:
    """What a handler may know of the frontend: its state when the request came (``dynamo.llm``).

    Handlers run in a thread, so this is a copy and not the state itself.
    """

    def __init__(
        self, *, ready: bool, cancelled: bool, registered: Iterable[str] = (), serving: Mapping[str, str] | None = None
    ) -> None:
        """``registered``: display names; ``serving``: names that can be asked, aliases too, with the display name."""
        self._ready = ready
        self._cancelled = cancelled
        self._registered = sorted(set(registered))
        self._serving = dict(serving or {})

    def is_ready(self) -> bool:
        """Whether the frontend has started and takes requests."""
        return self._ready

    def is_cancelled(self) -> bool:
        """Whether it is shutting down."""
        return self._cancelled

    def has_any_ready_model(self) -> bool:
        """Whether any model can be asked."""
        return bool(self._serving)

    def is_model_ready_to_serve(self, model: str) -> bool:
        """Whether the model of this name can be asked."""
        return model in self._serving

    def model_display_names(self) -> list[str]:
        """Names of all registered models, sorted."""
        return list(self._registered)

    def serving_ready_display_names(self) -> list[str]:
        """Names of the models that can be asked, sorted."""
        return sorted(set(self._serving.values()))


class FrontendResponse:
    """A handler's answer with a status of its own (``dynamo.llm``).

    Attributes:
        status_code: 100 to 999. What is no final status of HTTP (200 to 599) is answered with 500.
        body: What JSON can hold.
    """

    def __init__(self, status_code: int, body: object) -> None:
        """Raises TypeError, OverflowError or ValueError for a status that is none."""
        try:
            status = operator.index(status_code)
        except TypeError as error:
            raise TypeError(f"argument 'status_code': {error}") from error
        if not 0 <= status <= _MAX_U16:
            raise OverflowError("out of range integral type conversion attempted")
        if status not in _STATUSES:
            raise ValueError(f"invalid status code {status}: invalid status code")
        self.status_code = status
        self.body = body


class FrontendRoute:
    """A route of an extension (``dynamo.llm``): ``GET`` on a path without parameters.

    Attributes:
        method: ``GET``.
        path: As it stands in a request.
        handler: Takes a ``FrontendExtensionContext``; returns what JSON can hold (200), or a ``FrontendResponse``.
            It is called in a thread.
    """

    def __init__(self, method: str, path: str, handler: Callable[[FrontendExtensionContext], object]) -> None:
        """Raises ValueError or TypeError for what cannot be served."""
        if method.upper() != "GET":
            raise ValueError(f"unsupported FrontendRoute method '{method}'; only GET is supported")
        _check_path(path)
        if not callable(handler):
            raise TypeError("FrontendRoute handler must be callable")
        if inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__):
            raise ValueError("FrontendRoute handler must be synchronous; async def handlers are not supported")
        self.method = "GET"
        self.path = path
        self.handler = handler


def _check_path(path: str) -> None:
    shown = json.dumps(path, ensure_ascii=False)
    if not path.startswith("/"):
        raise ValueError(f"frontend route path must start with '/': {shown}")
    if any(segment.startswith((":", "*")) for segment in path.split("/")):
        raise ValueError(f"frontend route path segment must not start with ':' or '*': {shown}")
    if any(letter in "{}*" or letter.isspace() for letter in path):
        raise ValueError(f"frontend route path must be static (no '{{...}}', '*', or whitespace): {shown}")


def load_frontend_route_extensions(extension_names: Sequence[str]) -> list[FrontendRoute]:
    """The routes of these extensions, each name once (``dynamo.frontend.main``).

    Raises:
        ValueError: There is no such extension, or two packages register one under the name.
        TypeError: It is no provider, or returned something else than routes.
    """
    routes: list[FrontendRoute] = []
    for name in dict.fromkeys(extension_names):
        provider = _find_provider(name)
        if not callable(provider):
            raise TypeError(f"Frontend route extension {name!r} must resolve to a callable")
        routes += _routes_of(name, provider())
    return routes


def check_duplicates(routes: Sequence[FrontendRoute], taken: Iterable[str]) -> None:
    """Refuse a path that two have. ``taken``: paths of the frontend's own routes.

    Raises:
        ValueError: Names the path.
    """
    own, seen = set(taken), set[str]()
    for route in routes:
        named = f"{route.method} {route.path}"
        if route.path in seen:
            raise ValueError(f"duplicate frontend route registered: {named}")
        if route.path in own:
            raise ValueError(f"duplicate HTTP route registered: {named} conflicts with {named}")
        seen.add(route.path)


def _find_provider(name: str) -> Any:
    registered = entry_points(group=GROUP)
    found = [point for point in registered if point.name == name]
    if len(found) > 1:
        places = ", ".join(point.value for point in found)
        raise ValueError(f"Ambiguous frontend route extension {name!r} in entry point group {GROUP!r}: {places}")
    if found:
        return _load(found[0])
    if ":" in name:
        return _by_path(name)
    available = ", ".join(sorted({point.name for point in registered})) or "<none>"
    raise ValueError(
        f"Unknown frontend route extension {name!r} in entry point group {GROUP!r}. Available: {available}. "
        "Pass a registered name or a 'module:function' path."
    )


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"Could not load {point.value!r} for frontend route extension {point.name!r}: {error}"
        ) from error


def _by_path(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"Could not import module {module_name!r} for frontend route extension {name!r}") from error
    try:
        return reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        raise ValueError(
            f"Module {module_name!r} has no attribute {attribute!r} for frontend route extension {name!r}"
        ) from error


def _routes_of(name: str, made: Any) -> list[FrontendRoute]:
    if made is None:
        return []
    if isinstance(made, FrontendRoute):
        return [made]
    if not isinstance(made, Iterable):
        raise TypeError(
            f"Frontend route extension {name!r} must return a FrontendRoute or an iterable of FrontendRoute objects"
        )
    routes = list(made)
    for route in routes:
        if not isinstance(route, FrontendRoute):
            raise TypeError(
                f"Frontend route extension {name!r} returned unsupported route object {route!r}; "
                "expected dynamo.llm.FrontendRoute"
            )
    return routes

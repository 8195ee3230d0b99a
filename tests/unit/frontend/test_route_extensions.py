"""Routes of extensions: made, found and served as Dynamo's were recorded."""

from __future__ import annotations

import asyncio
import json
import sys
import types
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest

from dynamo_es.config.tree import HttpPathsConfig
from dynamo_es.frontend import route_extensions
from dynamo_es.frontend.asgi import FrontendApp
from dynamo_es.frontend.route_extensions import check_duplicates, load_frontend_route_extensions
from dynamo_es.frontend.routes import taken_paths
from dynamo_es.llm import FrontendExtensionContext, FrontendResponse, FrontendRoute
from tests.unit.frontend.asgi_client import call
from tests.unit.frontend.fakes import ScriptedEngine, application, frame, says, served
from tests.unit.frontend.golden_replay import DATA, flat, recorded

FUNCTIONS: Mapping[str, Any] = json.loads((DATA / "golden" / "frontend" / "functions.json").read_text())
BODIES: Mapping[str, Any] = {"{}": {}, "{'a': 1}": {"a": 1}, "<class 'object'>": object, "None": None}


def cases(name: str) -> list[Any]:
    return [pytest.param(case, id=str(case["input"])[:60]) for case in FUNCTIONS[name]["cases"]]


def fails_as(case: Mapping[str, Any], error: Exception) -> None:
    assert type(error).__name__ == case.get("raises"), error
    assert str(error) == case["message"]


async def asynchronous(context: FrontendExtensionContext) -> None: ...


HANDLERS: Mapping[str, Any] = {"sync callable": lambda context: None, "async def": asynchronous, "int 5": 5}


@pytest.mark.parametrize("case", cases("FrontendRoute(...)"))
def test_route_is_made_as_by_dynamo(case: Mapping[str, Any]) -> None:
    given = case["input"]
    try:
        route = FrontendRoute(given["method"], given["path"], HANDLERS[given["handler"]])
    except (ValueError, TypeError) as error:
        fails_as(case, error)
    else:
        assert [route.method, route.path] == case["output"]


@pytest.mark.parametrize("case", cases("FrontendResponse(...)"))
def test_response_is_made_as_by_dynamo(case: Mapping[str, Any]) -> None:
    given = case["input"]
    try:
        response = FrontendResponse(given["status_code"], BODIES[given["body"]])
    except (ValueError, TypeError, OverflowError) as error:
        fails_as(case, error)
    else:
        assert case["output"] is True
        assert response.status_code == given["status_code"]


@pytest.fixture
def extmod(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module that the recorded calls name."""
    route = FrontendRoute("GET", "/x1", lambda context: 1)
    module: Any = types.ModuleType("extmod")
    module.one = lambda: route
    module.none = lambda: None
    module.many = lambda: [route, route]
    module.gen = lambda: iter([route])
    module.bad = lambda: 5
    module.badlist = lambda: [route, "x"]
    module.notcall = 3
    module.NS = types.SimpleNamespace(fn=module.one)
    monkeypatch.setitem(sys.modules, "extmod", module)
    return module


@pytest.mark.parametrize("case", cases("load_frontend_route_extensions"))
def test_extensions_are_found_as_by_dynamo(case: Mapping[str, Any], extmod: Any) -> None:
    try:
        routes = load_frontend_route_extensions(case["input"]["extension_names"])
    except (ValueError, TypeError) as error:
        fails_as(case, error)
    else:
        assert [[route.method, route.path] for route in routes] == case["output"]


def register(monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str]) -> None:
    made = EntryPoints(EntryPoint(name, value, route_extensions.GROUP) for name, value in points)
    monkeypatch.setattr(route_extensions, "entry_points", lambda group: made.select(group=group))


def test_registered_name_comes_before_a_path(monkeypatch: pytest.MonkeyPatch, extmod: Any) -> None:
    register(monkeypatch, ("plain", "extmod:one"), ("extmod:none", "extmod:many"))
    assert [route.path for route in load_frontend_route_extensions(["plain"])] == ["/x1"]
    assert len(load_frontend_route_extensions(["extmod:none"])) == 2


def test_two_packages_with_one_name_are_refused(monkeypatch: pytest.MonkeyPatch, extmod: Any) -> None:
    register(monkeypatch, ("plain", "extmod:one"), ("plain", "extmod:many"))
    with pytest.raises(ValueError, match="Ambiguous frontend route extension 'plain'"):
        load_frontend_route_extensions(["plain"])


def test_registered_name_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, extmod: Any) -> None:
    register(monkeypatch, ("plain", "extmod:missing"))
    with pytest.raises(ValueError, match="Could not load 'extmod:missing' for frontend route extension 'plain'"):
        load_frontend_route_extensions(["plain"])


def test_duplicate_paths_are_refused() -> None:
    def at(path: str) -> FrontendRoute:
        return FrontendRoute("GET", path, lambda context: None)

    taken = taken_paths(HttpPathsConfig(health="/hz"))
    check_duplicates([at("/d"), at("/health")], taken)
    with pytest.raises(ValueError, match=r"^duplicate frontend route registered: GET /d$"):
        check_duplicates([at("/d"), at("/d")], taken)
    with pytest.raises(ValueError, match=r"^duplicate HTTP route registered: GET /hz conflicts with GET /hz$"):
        check_duplicates([at("/hz")], taken)


# -- served ------------------------------------------------------------------------------------------------------------


def info(context: FrontendExtensionContext) -> dict[str, Any]:
    return {
        "ready": context.is_ready(),
        "cancelled": context.is_cancelled(),
        "any": context.has_any_ready_model(),
        "m": context.is_model_ready_to_serve("m"),
        "zz": context.is_model_ready_to_serve("zz"),
        "names": context.model_display_names(),
        "serving": context.serving_ready_display_names(),
    }


def boom(context: FrontendExtensionContext) -> None:
    raise RuntimeError("boom")


def bare(context: FrontendExtensionContext) -> None:
    asyncio.get_running_loop()


ROUTES = (
    FrontendRoute("GET", "/ext/info", info),
    FrontendRoute("GET", "/ext/boom", boom),
    FrontendRoute("GET", "/ext/503", lambda context: FrontendResponse(503, {"a": 1})),
    FrontendRoute("GET", "/ext/none", lambda context: None),
    FrontendRoute("GET", "/ext/obj", lambda context: object()),
    FrontendRoute("GET", "/ext/204", lambda context: FrontendResponse(204, {"a": 1})),
    FrontendRoute("GET", "/ext/tuple", lambda context: (1, float("nan"))),
    FrontendRoute("GET", "/ext/999", lambda context: FrontendResponse(999, {})),
    FrontendRoute("GET", "/ext/thread", bare),
)


@pytest.fixture(scope="module")
def app() -> Iterator[FrontendApp]:
    with ThreadPoolExecutor(1) as executor:
        yield application(executor=executor, extensions=ROUTES)


@pytest.mark.parametrize(("name", "item"), list(recorded(["route_extension"])))
async def test_answer_is_that_of_dynamo(name: str, item: dict[str, Any], app: FrontendApp) -> None:
    reply = await call(app, item["path"], method=item["method"])
    assert reply.status == item["status"]
    expected = item["response_headers"]
    for header in ("content-type", "allow"):
        if header in expected:
            assert reply.headers[header] == expected[header]
    if item["method"] == "HEAD":  # the server leaves its body out
        assert reply.headers["content-length"] == expected["content-length"]
    elif reply.status == 405:  # says why here, as everywhere
        assert json.loads(reply.text)["code"] == 405
    else:
        text = flat(reply.text) if reply.status == 404 else reply.text
        assert text == item["response_body"]


async def test_values_that_json_has_not(app: FrontendApp) -> None:
    assert (await call(app, "/ext/tuple", method="GET")).text == "[1,null]"
    assert (await call(app, "/ext/999", method="GET")).status == 500


async def test_handlers_do_not_hold_up_the_event_loop(app: FrontendApp) -> None:
    reply = await call(app, "/ext/thread", method="GET")
    assert (reply.status, reply.json()) == (500, {"error": "frontend route extension failed"})


async def test_context_tells_the_present_state(executor: ThreadPoolExecutor) -> None:
    model = served(ScriptedEngine(says(frame("x", "stop"))))
    app = application(model, executor=executor, extensions=ROUTES, aliases={"al": "m"}, pending={"zz": "no worker"})
    reply = await call(app, "/ext/info", method="GET")
    known = {"names": ["m", "zz"], "serving": ["m"]}
    assert reply.json() == {"ready": True, "cancelled": False, "any": True, "m": True, "zz": False, **known}
    app.service.drain()
    reply = await call(app, "/ext/info", method="GET")
    assert (reply.json()["ready"], reply.json()["cancelled"]) == (False, True)


async def test_routes_are_part_of_the_api_description(app: FrontendApp) -> None:
    paths = (await call(app, "/openapi.json", method="GET")).json()["paths"]
    assert list(paths["/ext/info"]) == ["get"]

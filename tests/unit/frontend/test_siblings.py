"""Several frontend processes behind one port: their metrics on one page, their thresholds the same."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge

from dynamo_es.frontend.metrics import FrontendMetrics
from dynamo_es.frontend.metrics_pages import merge_pages
from dynamo_es.frontend.siblings import MetricsAsked, Siblings, ThresholdsSet, answers_of, page_of_all
from dynamo_es.router.overload import BusyThresholds
from tests.support.pages import Page
from tests.unit.frontend.asgi_client import call
from tests.unit.frontend.fakes import FixedDirectory, ScriptedEngine, application, frame, says, served


def page(value: float, *, with_gauge: bool = True) -> str:
    registry = CollectorRegistry()
    Counter("asked", "Requests\nof two lines", ["model"], registry=registry).labels('a "b" {c}\u2028 d').inc(value)
    if with_gauge:
        Gauge("open", "Streams", registry=registry).set(value)
    return FrontendMetrics(registry, "p").text().decode()


def test_pages_become_one_with_a_label_that_says_whose_a_sample_is() -> None:
    merged = merge_pages({0: page(1), 3: page(5, with_gauge=False), 1: page(2)})
    told = Page(merged)
    name = 'model=a "b" {c}\u2028 d'
    assert [told["asked_total", f"frontend_process={index}", name] for index in (0, 1, 3)] == [1, 2, 5]
    assert told["open", "frontend_process=0"] == 1
    assert ("open", frozenset({"frontend_process=3"})) not in told.samples
    assert merged.count("# TYPE asked_total counter\n") == 1
    assert all("frontend_process=" in line for line in merged.splitlines() if line and line.startswith("asked"))


def test_a_family_that_only_a_later_page_has_is_there() -> None:
    told = Page(merge_pages({0: page(1, with_gauge=False), 1: page(2)}))
    assert told["open", "frontend_process=1"] == 2


async def test_processes_answer_each_other_and_one_that_is_away_is_left_out(tmp_path: Path) -> None:
    metrics = [FrontendMetrics(CollectorRegistry(), "p") for _ in range(2)]
    directory = FixedDirectory({"m": served(ScriptedEngine(says(frame("x", "stop"))))})
    first, second = (Siblings(tmp_path, index, 3) for index in range(2))
    await first.start(answers_of(metrics[0], None))
    await second.start(answers_of(metrics[1], directory))
    try:
        assert await first.ask(MetricsAsked()) == {1: metrics[1].text()}
        limits = BusyThresholds(0.5, 7, None)
        await first.ask(ThresholdsSet("m", limits))
        await first.ask(ThresholdsSet("nobody", limits))
        assert directory.limits == {"m": limits}
        assert await first.thresholds() == {"m": limits}
        assert await second.thresholds() == {}
        assert 'frontend_process="1"' in (await page_of_all(first, metrics[0].text())).decode()
        assert await page_of_all(None, b"own") == b"own"
    finally:
        await first.close()
        await second.close()
    assert await first.ask(MetricsAsked()) == {}
    assert os.listdir(tmp_path) == []


async def test_what_is_no_question_gets_no_answer(tmp_path: Path) -> None:
    sibling = Siblings(tmp_path, 0, 2)
    await sibling.start(answers_of(FrontendMetrics(CollectorRegistry(), "p"), None))
    try:
        for sent in (b"\xff\xff\xff\xff", b"\0\0\0\1\xc1"):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "0.sock")
            writer.write(sent)
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()
    finally:
        await sibling.close()


async def test_an_operator_tells_all_processes(executor: ThreadPoolExecutor, tmp_path: Path) -> None:
    model = served(ScriptedEngine(says(frame("x", "stop"))))
    app = application(model, executor=executor, aliases={"al": "m"})
    other = FixedDirectory({"m": model})
    app.service.siblings, sibling = Siblings(tmp_path, 0, 2), Siblings(tmp_path, 1, 2)
    await sibling.start(answers_of(FrontendMetrics(CollectorRegistry(), "p"), other))
    try:
        body = b'{"model":"al","active_prefill_tokens_threshold":9}'
        assert (await call(app, "/busy_threshold", body)).status == 200
        assert other.limits == {"m": BusyThresholds(None, 9, None)}
        page = await call(app, "/metrics", method="GET")
        assert 'frontend_process="0"' in page.text
        assert 'frontend_process="1"' in page.text
    finally:
        await sibling.close()

"""Dashboard, alarms and runbook name metrics, labels, values and commands that exist."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric

from dynamo_es.cli.main import build_parser
from dynamo_es.clock import SystemClock
from dynamo_es.frontend.loop_canary import LoopCanary
from dynamo_es.frontend.metrics import FrontendMetrics
from dynamo_es.frontend.metrics_views import RoutersCollector
from dynamo_es.log.state import LogCondition
from dynamo_es.router.decision_reasons import KV_REASONS
from dynamo_es.router.remote_index_metrics import RemoteIndexCollector
from dynamo_es.runtime.metrics import MAX_MODELS, BoundsCollector, LabelBound
from dynamo_es.runtime.metrics_index import (
    BookingsCollector,
    IndexCollector,
    SnapshotAgeCollector,
    SnapshotCollector,
)
from dynamo_es.runtime.metrics_runtime import RuntimeCollector
from dynamo_es.services.dc_relay.metrics import GlobalViewCollector, RelayCollector
from schemas.registry import InstanceState
from streams.pool_metrics import PoolCollector
from tests.unit.test_docker_files import CLUSTER, ROOT, flags_of, services

DOCKER = ROOT / "docker"
RULES: dict[str, Any] = yaml.safe_load((DOCKER / "prometheus" / "rules.yaml").read_text())
SCRAPES: dict[str, Any] = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yaml").read_text())
DASHBOARD: dict[str, Any] = json.loads((DOCKER / "grafana" / "dashboards" / "dynamo-es.json").read_text())
RUNBOOK = (DOCKER / "RUNBOOK.md").read_text()

ALL_RULES = [rule for group in RULES["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in ALL_RULES if "alert" in rule}
RECORDED = {rule["record"]: rule["expr"] for rule in ALL_RULES if "record" in rule}
each_alert = pytest.mark.parametrize("alert", ALERTS.values(), ids=list(ALERTS))
# Of every scrape.
TARGET = {"job", "instance"}
# What the label of a metric may be, where a typing error would make an expression empty for ever.
VALUES = {
    ("dynamo_es_log_state", "state"): {condition.value for condition in LogCondition},
    ("dynamo_es_registry_instances", "state"): set(get_args(InstanceState)),
    ("dynamo_es_index_sources", "trust"): {"exact", "degraded", "retired"},
    ("dynamo_es_snapshots_total", "result"): {"written", "failed", "refused"},
    ("dynamo_es_events_total", "result"): {"taken", "refused"},
    ("dynamo_es_index_batches_total", "result"): {"seen", "duplicate", "straggler", "gap", "skipped-degraded"},
    ("dynamo_es_routing_decisions_total", "reason"): set(KV_REASONS),
    ("dynamo_es_global_data_centres", "state"): {"fresh", "stale"},
    ("dynamo_es_registry_entries", "kind"): {"lease", "lease-end", "instance", "model", "resync"},
    ("dynamo_frontend_requests_total", "error_type"): {
        "internal",
        "unavailable",
        "validation",
        "not_found",
        "overload",
    },
}


def declared() -> Iterator[Metric]:
    """Every family that some process shows, without samples."""
    nothing: Any = None
    yield from RuntimeCollector(nothing).describe()
    yield from IndexCollector(nothing, nothing).describe()
    yield from BookingsCollector(nothing).describe()
    yield from SnapshotAgeCollector(nothing, nothing, nothing).describe()
    yield from SnapshotCollector(nothing).describe()
    yield from RoutersCollector(nothing, nothing, "dynamo_frontend").describe()
    yield from BoundsCollector(LabelBound("model", 1)).describe()
    yield from PoolCollector(nothing, nothing).describe()
    yield from RemoteIndexCollector(nothing).describe()
    yield from RelayCollector(nothing).describe()
    yield from GlobalViewCollector(nothing).describe()
    registry = CollectorRegistry()
    frontend = FrontendMetrics(registry)
    frontend.model("m").started("chat_completions", "unary")
    frontend.finished("chat_completions", "m", "unary", 200)
    LoopCanary(registry, "dynamo_frontend", SystemClock())
    ProcessCollector(registry=registry)
    yield from registry.collect()


def labels_of(metric: Metric) -> set[str]:
    known = getattr(metric, "_labelnames", ())
    return {*known, *(label for sample in metric.samples for label in sample.labels)}


def sample_names(metric: Metric) -> list[str]:
    if metric.type == "histogram":
        return [f"{metric.name}_{part}" for part in ("bucket", "sum", "count")]
    return [f"{metric.name}_total" if metric.type == "counter" else metric.name]


METRICS = {name: labels_of(metric) for metric in declared() for name in sample_names(metric)}
METRICS["up"] = set()


def nodes(expression: str) -> list[Any]:
    found: list[Any] = []
    promql_parser.walk(promql_parser.parse(expression), lambda node: found.append(node) or True)
    return found


def check_expression(expression: str) -> None:
    """Raises if it is not PromQL, or uses a metric, a label or a value that there is not."""
    allowed = set(TARGET)
    grouped: set[str] = set()
    for node in nodes(expression):
        if isinstance(node, promql_parser.VectorSelector):
            if node.name in RECORDED:
                inner = nodes(RECORDED[node.name])[0]
                labels = set(inner.modifier.labels)
            else:
                assert node.name in METRICS, f"no metric {node.name}: {expression}"
                labels = METRICS[node.name]
            allowed |= labels
            for matcher in node.matchers.matchers:
                assert matcher.name in labels | TARGET, f"{node.name} has no label {matcher.name}"
                values = VALUES.get((node.name, matcher.name))
                if values is not None:
                    assert set(matcher.value.split("|")) <= values, f"{node.name}: {matcher.name}={matcher.value}"
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            grouped |= set(node.modifier.labels)
    assert grouped <= allowed, f"grouped by {grouped - allowed}: {expression}"


def result_labels(expression: str) -> set[str]:
    """Labels that the result may have."""
    return _labels(promql_parser.parse(expression))


def _labels(node: Any) -> set[str]:
    if isinstance(node, promql_parser.VectorSelector):
        if node.name in RECORDED:
            return result_labels(RECORDED[node.name])
        return TARGET | METRICS.get(node.name, set())
    if isinstance(node, promql_parser.AggregateExpr):
        return set(node.modifier.labels) if node.modifier is not None else set()
    inner = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "vector_selector")]
    parts = [*inner, *getattr(node, "args", ())]
    return set().union(*(_labels(part) for part in parts if part is not None))


def test_the_check_finds_what_is_wrong() -> None:
    check_expression('rate(dynamo_es_fold_records_total{job="x"}[5m]) > 1')
    for wrong in (
        "dynamo_es_fold_records",
        'dynamo_es_log_state{condition="away"}',
        'dynamo_es_log_state{state="gone"}',
        "sum by (worker) (dynamo_es_log_state)",
    ):
        with pytest.raises(AssertionError):
            check_expression(wrong)
    for broken in ("sum(rate(x[5m])", "rate(up)"):
        with pytest.raises(ValueError, match=r"parenthesis|matrix"):
            check_expression(broken)


@pytest.mark.parametrize("expression", [rule["expr"] for rule in ALL_RULES])
def test_rules_use_what_exists(expression: str) -> None:
    check_expression(expression)


@each_alert
def test_an_alarm_says_what_where_and_where_to_read_on(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in {"critical", "warning"}
    assert alert["annotations"]["runbook"] == f"docker/RUNBOOK.md#{alert['alert'].lower()}"
    used = set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"]))
    assert used <= result_labels(alert["expr"])
    assert re.fullmatch(r"\d+[smh]", alert.get("for", "0s"))


@each_alert
def test_the_runbook_tells_what_an_alarm_means_and_what_to_do(alert: dict[str, Any]) -> None:
    section = RUNBOOK.split(f"\n## {alert['alert']}\n", 1)[1].split("\n## ", 1)[0]
    for part in ("**Means:**", "**Look:**", "**Do:**"):
        assert section.count(part) == 1, (alert["alert"], part)


def test_the_runbook_has_no_alarm_that_is_gone() -> None:
    assert set(re.findall(r"^## (DynamoEs\w+)$", RUNBOOK, re.MULTILINE)) == ALERTS.keys()
    assert set(re.findall(r"`(DynamoEs\w+)`", RUNBOOK)) <= ALERTS.keys()


def test_the_runbook_names_metrics_files_and_bounds_that_exist() -> None:
    for name in re.findall(r"`(dynamo_(?:es|frontend)_\w+)`", RUNBOOK):
        assert name in METRICS or f"{name}_bucket" in METRICS, name
    for target in re.findall(r"\]\(([^)#]+)\)", RUNBOOK):
        assert (DOCKER / target).is_file(), target
    assert f"the first {MAX_MODELS} names" in RUNBOOK


def runbook_commands() -> list[str]:
    blocks = re.findall(r"^```\n(.*?)^```", RUNBOOK, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("dynamo-es ")]


@pytest.mark.parametrize("command", sorted(set(runbook_commands())))
def test_the_runbooks_commands_are_commands(command: str) -> None:
    build_parser().parse_args(shlex.split(command)[1:])


def test_options_that_the_runbook_names_exist() -> None:
    parser = build_parser()
    known = set(re.findall(r"--[a-z][a-z-]+", "\n".join(helps(parser))))
    assert set(re.findall(r"`(--[a-z][a-z-]+)`", RUNBOOK)) <= known


def helps(parser: Any) -> Iterator[str]:
    yield parser.format_help()
    for action in parser._actions:
        for sub in (getattr(action, "choices", None) or {}).values() if hasattr(action, "add_parser") else ():
            yield from helps(sub)


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def in_grafana(expression: str) -> str:
    """With a value for each of Grafana's variables."""
    return expression.replace("$__rate_interval", "5m").replace("$job", ".*").replace("$instance", ".*")


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_panels_use_what_exists(panel: dict[str, Any]) -> None:
    assert panel["targets"]
    for target in panel["targets"]:
        expression = in_grafana(target["expr"])
        check_expression(expression)
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= result_labels(expression), target["expr"]
        assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    assert (DASHBOARD["uid"], DASHBOARD["title"]) == ("dynamo-es", "dynamo-es")
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource", "job", "instance"}
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    for annotation in DASHBOARD["annotations"]["list"]:
        promql_parser.parse(annotation["expr"])


def test_prometheus_scrapes_every_process_of_the_cluster_under_its_role() -> None:
    scraped = {job["job_name"]: job["static_configs"][0]["targets"] for job in SCRAPES["scrape_configs"]}
    assert scraped == {
        f"dynamo-es-{role}": [
            f"{name}:{flags_of(service['command'])[port]}" for name, service in services(CLUSTER, role).items()
        ]
        for role, port in (("frontend", "--http-port"), ("worker", "--system-port"), ("streams", "--system-port"))
    }
    assert SCRAPES["rule_files"] == ["rules.yaml"]
    jobs = {matcher.value for rule in ALL_RULES for node in nodes(rule["expr"])
            if isinstance(node, promql_parser.VectorSelector)
            for matcher in node.matchers.matchers if matcher.name == "job"}  # fmt: skip
    assert jobs <= {"dynamo-es-.+", *scraped}


def test_prometheus_and_grafana_find_their_files() -> None:
    for name in ("prometheus", "grafana"):
        for volume in CLUSTER["services"][name]["volumes"]:
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (DOCKER / source).is_dir(), source
    (config,) = [word for word in CLUSTER["services"]["prometheus"]["command"] if word.startswith("--config.file=")]
    assert (DOCKER / "prometheus" / Path(config).name).is_file()
    provisioning = DOCKER / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "dynamo-es.yaml").read_text())["providers"]
    mounted = [volume.split(":")[1] for volume in CLUSTER["services"]["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounted

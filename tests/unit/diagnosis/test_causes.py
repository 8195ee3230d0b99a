"""Rules from facts to causes, without I/O. OPS-02."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from dynamo_es.diagnosis import causes
from dynamo_es.diagnosis.causes import diagnose
from dynamo_es.diagnosis.facts import (
    Facts,
    HealthPage,
    LogCondition,
    LoggedFacts,
    LoggedModel,
    ModelHealth,
    NamedWorker,
    NamedWorkers,
    NoFrontend,
    RemoteIndexState,
    ViewState,
    read_health,
)
from dynamo_es.diagnosis.text import text_of
from dynamo_es.router.decision_reasons import KV_REASONS, decision_reason
from dynamo_es.router.routing_report import RankCounts, RankReport, RoutingReport
from dynamo_es.runtime.progress import Stall

RUNBOOK = (Path(__file__).parents[3] / "docker" / "RUNBOOK.md").read_text()


def routing(**members):
    ranks = RankCounts(total=2, exact=2)
    return RoutingReport(
        **{
            "mode": "kv", "takes_text": False, "generates": True, "block_size": 16, "index": "own",
            "overlap_credit": 1.0, "decisions": {}, "queried_blocks": 0, "matched_blocks": 0, "selected_blocks": 0,
            "ranks": ranks, **members,
        }
    )  # fmt: skip


def page(models=None, **members):
    models = {"m": ModelHealth(True, None, routing())} if models is None else models
    views = {"kv-index": ViewState("live", 3)}
    return HealthPage("healthy", log=LogCondition("ok"), views=views, models=models, **members)


def codes(facts, only=None):
    found = diagnose(facts, only)
    list(text_of(found))
    return {cause.code for cause in [*found.causes, *(cause for model in found.models for cause in model.causes)]}


def codes_of(**members):
    return codes(Facts(page({"m": ModelHealth(True, None, routing(**members))}), since="1h"))


def test_OPS_02_nothing_is_wrong_and_nothing_was_asked_yet():
    found = diagnose(Facts(page()))
    assert found.healthy
    assert "no decision since the frontend started" in found.models[0].summary


def test_OPS_02_log_and_folds_of_the_frontend():
    stall = Stall("kv-index", "d.kv-events", 3, 12, 8, 40.0)
    assert codes(Facts(page(stalled=[stall]))) == {"fold-stalled"}
    behind = page()
    behind.views = {"kv-index": ViewState("live", 100_000), "registry": ViewState("catching-up", 5, 40.0)}
    assert codes(Facts(behind)) == {"fold-behind", "fold-not-live"}
    away = page(remote_index=RemoteIndexState([1, 2]), refused_records={"kv-events": {"unknown_version": 2}})
    away.log = LogCondition("away", "no broker answers")
    assert codes(Facts(away)) == {"log-away", "index-partitions-missing", "hash-version"}


def test_OPS_02_a_frontend_that_takes_no_requests_now():
    recovering = {"status": "not_ready", "stage": "recovering", "message": "is being recovered", "log": {"state": "ok"},
                  "views": {"kv-index": {"state": "catching-up", "progress_percent": 3.5}}}  # fmt: skip
    assert codes(Facts(read_health(json.dumps(recovering).encode()))) == {"frontend-not-ready", "fold-not-live"}
    draining = b'{"status":"not_ready","stage":"draining","message":"Service is not ready"}'
    assert codes(Facts(read_health(draining))) == {"frontend-not-ready"}


def test_a_frontend_whose_engines_are_its_own():
    found = diagnose(Facts(read_health(b'{"status":"healthy","models":{"m":{"ready":true,"reason":null}}}')))
    assert found.healthy
    assert found.models[0].summary == "the frontend's own process answers"


def test_OPS_02_one_side_cannot_be_asked():
    assert codes(Facts(page(), log_problem="no broker answers")) == {"log-unreadable"}
    assert codes(Facts(None, "refused", LoggedFacts())) == {"frontend-away", "no-workers"}


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("not loaded: no such folder", "tokenizer-not-loaded"),
        ("its tokenizer is being loaded", "tokenizer-not-loaded"),
        ("no namespace has all required worker types live", "not-ready"),
    ],
)
def test_OPS_02_a_model_that_is_not_ready(reason, code):
    refused = NamedWorkers(1, [NamedWorker(7, "has other files", "use another name")])
    assert codes(Facts(page({"m": ModelHealth(False, reason, None, refused)}))) == {code, "worker-refused"}


def test_OPS_02_the_first_setting_that_applies_hides_what_follows_from_it():
    silent = {"ranks": RankCounts(total=1, silent=1), "untrusted": [RankReport(7, 0, "silent")]}
    assert codes_of(**silent) == codes_of(**silent, decisions={"no-overlap": 9}) == {"no-events"}
    assert codes_of(mode="round-robin", decisions={"round-robin": 9}, **silent) == {"mode-not-kv"}
    assert codes_of(index="none", overlap_credit=0.0, **silent) == {"credit-zero"}
    assert codes_of(index="approximate", **silent) == {"events-disabled"}
    assert codes_of(index="approximate", decisions={"overlap": 2, "no-overlap": 3}, **silent) == set()
    assert codes_of(takes_text=True, generates=False, mode="least-loaded") == {"workers-take-text"}
    assert codes_of(generates=False, mode="least-loaded", ranks=None) == set()


def test_OPS_02_ranks_by_what_is_not_known_of_them():
    untrusted = [
        RankReport(1, 0, "silent"), RankReport(2, 0, "silent", other_model="n"), RankReport(3, 1, "degraded", asked=4),
        RankReport(4, 0, "other-block-size", block_size=64), RankReport(5, 0, "retired"),
    ]  # fmt: skip
    counts = RankCounts(total=9, exact=4, silent=2, degraded=1, retired=1, other_block_size=1)
    facts = Facts(page({"m": ModelHealth(True, None, routing(ranks=counts, untrusted=untrusted))}))
    (model,) = diagnose(facts).models
    by_code = {cause.code: cause for cause in model.causes}
    assert by_code.keys() == {"no-events", "events-under-other-model", "events-missing", "block-size-mismatch"}
    assert by_code["no-events"].workers == [1, 5]
    assert by_code["no-events"].what.startswith("no KV events of 2 of 9 ranks")
    assert "asked 4 time(s)" in by_code["events-missing"].what
    assert by_code["block-size-mismatch"].workers == [4]


def test_OPS_02_workers_that_hold_nothing_although_prompts_came():
    empty = RankCounts(total=2, exact=2, empty=2)
    assert codes_of(ranks=empty) == set()
    assert codes_of(ranks=empty, queried_blocks=9, decisions={"no-overlap": 3}) == {"caches-empty", "no-overlap"}


@pytest.mark.parametrize(
    ("decisions", "expected"),
    [
        ({"overlap": 9, "no-overlap": 10}, set()),
        ({"no-overlap": 10}, {"no-overlap"}),
        ({"overlap": 1, "no-overlap": 50, "prompt-under-one-block": 40}, {"no-overlap", "prompts-short"}),
        ({"load-over-overlap": 3}, {"load-over-overlap"}),
        # Compared, and alike everywhere: nothing is in the way, and nothing is to be done.
        ({"equal-overlap": 3, "no-overlap": 0}, set()),
        ({"equal-overlap": 95, "overlap": 5}, set()),
        ({"equal-overlap": 80, "no-overlap": 20}, set()),
        ({"no-events": 3}, {"no-events"}),
        ({"no-events": 50, "no-overlap": 50}, {"no-events", "no-overlap"}),
        ({"no-events": 3, "overlap": 97}, set()),
    ],
)
def test_OPS_02_what_prompts_are_like_counts_where_overlap_decides_next_to_nothing(decisions, expected):
    assert codes_of(decisions=decisions) == expected


def test_OPS_02_the_same_overlap_everywhere_is_told_and_is_no_fault():
    decisions = {"equal-overlap": 95, "overlap": 5}
    found = diagnose(Facts(page({"m": ModelHealth(True, None, routing(decisions=decisions))})))
    (line,) = text_of(found)
    assert found.healthy
    assert line.startswith("model m: routed by cache: ")
    assert "95 of 100 found the same overlap at every worker, so that load decided (equal-overlap)" in line


def test_OPS_02_what_comes_from_outside_does_not_steer_the_terminal():
    name = "\x1b]0;title\x07m\u202e\r\n"
    ranks = {"ranks": RankCounts(total=1, silent=1), "untrusted": [RankReport(7, 0, "silent", other_model=name)]}
    log = LoggedFacts({name: LoggedModel(routing(mode=name, **ranks), [], 1)}, {name: 2})
    refused = NamedWorkers(1, [NamedWorker(7, name, name)])
    models = {
        name: ModelHealth(False, name, routing(mode=name), refused),
        "m": ModelHealth(True, None, routing(**ranks)),
    }
    own = page(models, stalled=[Stall(name, name, 3, 12, 8, 40.0)])
    own.log, own.views = LogCondition(name, name), {name: ViewState(name)}
    for facts in (
        Facts(own, log=log),
        Facts(None, name, log, name),
        Facts(read_health(b'{"status":"x","stage":"\\u001b"}')),
    ):
        lines = list(text_of(diagnose(facts)))
        assert lines
        assert all(line.isprintable() for line in lines), lines


def test_OPS_02_no_cache_was_known_when_requests_were_routed():
    silent = {"ranks": RankCounts(total=1, silent=1), "untrusted": [RankReport(7, 0, "silent")]}
    for ranks in ({}, {"ranks": None, "index": "remote"}, silent):
        shown = routing(decisions={"no-events": 100}, **ranks)
        (model,) = diagnose(Facts(page({"m": ModelHealth(True, None, shown)}))).models
        (cause,) = model.causes
        assert (model.by_cache, cause.code) == (False, "no-events")
    facts = Facts(page({"m": ModelHealth(True, None, routing(decisions={"no-events": 100}))}))
    assert (
        "100 of 100 decisions since the frontend started: no worker's cache was known"
        in list(text_of(diagnose(facts)))[1]
    )


def logged(**members):
    return LoggedFacts({"m": LoggedModel(routing(**members), [], 2)})


def test_OPS_02_decisions_of_routers_in_another_mode_do_not_stand_for_this_frontends():
    own = {"m": ModelHealth(True, None, routing(decisions={"overlap": 100}, queried_blocks=9))}
    others = logged(mode="round-robin", decisions={"round-robin": 50})
    (model,) = diagnose(Facts(page(own), log=others, since="15min")).models
    assert model.by_cache
    assert "mode kv, 2 of 2 ranks exact, 100 of 100 decisions by overlap since the frontend started" in model.summary
    assert "beside them 50 decisions in mode round-robin since 15min, by other routers" in model.summary
    mixed = logged(mode="round-robin", decisions={"round-robin": 50, "overlap": 30, "no-overlap": 10})
    (model,) = diagnose(Facts(page(own), log=mixed, since="15min")).models
    assert "30 of 40 decisions by overlap since 15min, at all routers in mode kv" in model.summary
    assert "50 decisions in mode round-robin" in model.summary


def test_OPS_02_a_frontend_in_another_mode_is_told_as_such_whatever_other_routers_do():
    own = {"m": ModelHealth(True, None, routing(mode="random", decisions={"random": 7}))}
    (model,) = diagnose(Facts(page(own), log=logged(decisions={"overlap": 30}), since="1h")).models
    assert [cause.code for cause in model.causes] == ["mode-not-kv"]
    assert "7 decisions since the frontend started" in model.summary
    assert "30 decisions in mode kv" in model.summary


@pytest.mark.parametrize("newest", ["kv", "round-robin"])
def test_OPS_02_routers_of_different_modes_in_the_log_are_told_whichever_was_the_last(newest):
    decisions = {"round-robin": 50, "overlap": 50}
    found = diagnose(Facts(log=logged(mode=newest, decisions=decisions), since="1h"))
    (cause,) = found.models[0].causes
    assert cause.code == "mode-not-kv"
    assert "50 of 100 decisions since 1h were made in mode round-robin" in cause.what
    assert "50 of 50 decisions by overlap" in found.models[0].summary
    few = {"round-robin": 5, "overlap": 95}
    assert codes(Facts(log=logged(mode=newest, decisions=few), since="1h")) == set()
    none = {"round-robin": 5}
    assert codes(Facts(log=logged(mode="round-robin", decisions=none), since="1h")) == {"mode-not-kv"}


def test_other_names_of_a_model_are_told_with_it_unless_they_are_not_ready():
    short = routing(decisions={"prompt-under-one-block": 2})
    models = {
        "m": ModelHealth(True, None, short), "alias": ModelHealth(True, routed_as="m"),
        "adapter": ModelHealth(False, "nobody has it", routed_as="m"),
    }  # fmt: skip
    assert [model.model for model in diagnose(Facts(page(models))).models] == ["m", "adapter"]
    assert codes(Facts(page(models))) == {"prompts-short", "not-ready"}
    assert codes(Facts(page(models)), "alias") == {"prompts-short"}


def test_only_one_model():
    models = {"a": ModelHealth(True, None, routing()), "b": ModelHealth(False, "why")}
    assert codes(Facts(page(models)), "a") == set()
    assert codes(Facts(page(models)), "b") == {"not-ready"}
    assert codes(Facts(page(models)), "c") == {"no-model"}


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b"<html>", b"[" * 5000, b'{"status":"x","models":1}', b'{"status":"healthy"}']
)
def test_a_page_that_is_no_frontends(body):
    with pytest.raises(NoFrontend, match="--url"):
        read_health(body)


def test_a_page_of_a_later_release_is_read_as_far_as_it_is_known():
    body = json.loads(msgspec.json.encode(page()))
    body["models"]["m"]["routing"]["news"] = body["news"] = [1]
    assert read_health(json.dumps(body).encode()).models["m"].routing == routing()


def test_OPS_02_every_reason_has_its_decision():
    def word(chosen, overlaps, isl=32, informed=True, mode="kv"):
        return decision_reason(mode, isl, 16, chosen, overlaps, max(overlaps, default=0), informed=informed)

    found = {
        word(2, [0, 2]), word(2, [2, 2]), word(0, [0, 2]), word(0, [0, 0]), word(0, [], informed=False),
        word(0, [], isl=15),
    }  # fmt: skip
    assert found == set(KV_REASONS)
    assert word(1, [1]) == "overlap"
    assert word(0, [], mode="random") == "random"


def test_the_runbook_has_every_code_and_every_alarm_that_a_cause_names():
    section = RUNBOOK.split("## Requests are not routed by cache", 1)[1].split("\n## ", 1)[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert {code for cell in cells for code in re.findall("`([a-z-]+)`", cell)} == set(get_args(causes.Code))
    alarms = set(re.findall(r"^## (DynamoEs\w+)", RUNBOOK, re.MULTILINE))
    assert set(re.findall(r"DynamoEs\w+", inspect.getsource(causes))) <= alarms

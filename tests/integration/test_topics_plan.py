"""``dynamo-es topics plan|apply|check`` on an embedded log, as a user and a pipeline run them."""

from __future__ import annotations

import json

import pytest

from dynamo_es.cli.main import main
from schemas.catalog import TOPICS


@pytest.fixture
def topics(tmp_path, capsys):
    """Runs one action; exit code and what was printed."""

    def run(action, *flags):
        code = main(["topics", action, "--log", f"embedded://{tmp_path}/log", *flags])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def topic_file(tmp_path, topic):
    return tmp_path / "log" / "topics" / f"dynamo.{topic}" / "topic.json"


def test_apply_makes_all_topics_and_check_agrees(topics):
    code, out, _ = topics("apply")
    assert code == 0
    assert out.count("+ create") == len(TOPICS)
    assert "partitions 8, cleanup.policy delete, retention.ms -1 (for ever), max.message.bytes 1049600" in out
    assert out.endswith("all topics are as declared\n")
    code, out, _ = topics("check")
    assert code == 0
    assert out.count("= as declared") == len(TOPICS)


def test_plan_and_check_change_nothing(topics, tmp_path):
    topics("apply", "--topic-retention", "requests=24h")
    before = topic_file(tmp_path, "requests").read_bytes()
    code, out, _ = topics("plan")
    assert code == 0
    assert "~ change       dynamo.requests\n" in out
    assert "retention.ms 86400000 (1 d) -> 604800000 (7 d)\n" in out
    assert topics("check")[0] == 1
    assert topic_file(tmp_path, "requests").read_bytes() == before
    assert topics("check", "--topic-retention", "requests=24h")[0] == 0


def test_apply_changes_what_may_be_changed_and_keeps_the_topic(topics, tmp_path):
    topics("apply")
    before = json.loads(topic_file(tmp_path, "requests").read_text())
    assert topics("apply", "--topic-retention", "requests=24h")[0] == 0
    after = json.loads(topic_file(tmp_path, "requests").read_text())
    assert after == {**before, "retention_ms": 86_400_000}


def test_EVT_16_apply_refuses_another_partition_count_and_touches_nothing(topics, tmp_path):
    topics("apply")
    for topic, count in (("registry", 3), ("kv-snapshots", 4)):
        path = topic_file(tmp_path, topic)
        path.write_text(json.dumps({**json.loads(path.read_text()), "partitions": count}))
    before = {path: path.read_bytes() for path in tmp_path.rglob("topic.json")}
    code, out, err = topics("apply", "--topic-retention", "requests=24h")
    assert code == 2
    assert "! refused      dynamo.registry\n" in out
    assert err.startswith("dynamo-es: nothing was changed: ")
    assert err.count("\n") == 1
    assert "dynamo.registry: 3 partitions, declared 1: a key's partition hangs on the count" in err
    assert "dynamo.kv-snapshots: 4 partitions, declared 8" in err
    assert "dynamo.kv-events, which has 8" in err
    assert "use another --topic-namespace" in err
    assert {path: path.read_bytes() for path in tmp_path.rglob("topic.json")} == before
    assert topics("check")[0] == 1
    assert topics("plan")[0] == 0


def test_what_cannot_be_changed_in_place_is_left_to_do_by_hand(topics, tmp_path):
    topics("apply")
    path = topic_file(tmp_path, "requests")
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "compacted": True, "retention_ms": None, "max_record_bytes": 5})
    )
    code, out, _ = topics("apply")
    assert code == 1
    assert "left to do by hand:\n! by hand      dynamo.requests\n" in out
    assert "cleanup.policy compact -> delete: this log cannot change it in place" in out
    assert json.loads(path.read_text())["max_record_bytes"] == 1_048_576


def test_contradicting_options_are_told_before_a_log_is_made(topics, tmp_path):
    code, _, err = topics("apply", "--topic-retention", "kv-events=1h")
    assert code == 2
    assert "trimmed below its snapshots" in err
    code, _, err = topics("apply", "--topic-min-insync-replicas", "2", "--topic-replication", "1")
    assert code == 2
    assert "--topic-min-insync-replicas 2 is more than --topic-replication 1" in err
    assert list(tmp_path.iterdir()) == []

from __future__ import annotations

import logging

import pytest

from dynamo_es.config.log_filter import OFF, parse_log_filter


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("info", {"dynamo_es": logging.INFO, "aiokafka": logging.INFO}),
        ("WARN", {"x": logging.WARNING}),
        ("trace", {"x": logging.DEBUG}),
        ("off", {"x": OFF}),
        ("", {"x": logging.INFO}),
        ("info,dynamo=debug", {"dynamo_es.router.cost": logging.DEBUG, "uvicorn": logging.INFO}),
        ("dynamo_es.router=debug", {"dynamo_es.router.cost": logging.DEBUG, "dynamo_es.log": logging.INFO}),
        # The longest target wins, wherever it stands.
        ("a.b=debug,a=error,warn", {"a.b.c": logging.DEBUG, "a.c": logging.ERROR, "b": logging.WARNING}),
        ("dynamo_es::log=error", {"dynamo_es.log.kafka": logging.ERROR}),
        (" info , aiokafka = off ,", {"x": logging.INFO, "aiokafka.conn": OFF}),
        ("debug,error", {"x": logging.ERROR}),
    ],
)
def test_levels_by_target(text, levels):
    found = parse_log_filter(text)
    assert {name: found.level_of(name) for name in levels} == levels
    assert found.lowest <= min(levels.values())


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("inof", "'inof' is no level"),
        ("dynamo", "'dynamo' is no level"),
        ("info,dynamo=loud", "'loud' is no level"),
        ("info,dynamo=", "'' is no level"),
        ("=debug", "'' is no target"),
        ("my-span[request]=debug", "'my-span\\[request\\]' is no target"),
        ("a b=debug", "'a b' is no target"),
        ("a=b=debug", "'a=b' is no target"),
        ("info;debug", "'info;debug' is no level"),
    ],
)
def test_a_bad_part_is_named(text, wrong):
    with pytest.raises(ValueError, match=wrong):
        parse_log_filter(text)


def test_a_message_is_shown_by_the_level_of_its_logger():
    shown = parse_log_filter("warning,a=debug")
    assert shown.admits(logging.LogRecord("a.b", logging.DEBUG, "", 0, "", None, None))
    assert not shown.admits(logging.LogRecord("b", logging.INFO, "", 0, "", None, None))

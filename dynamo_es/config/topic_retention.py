"""``--topic-retention``: ages of single topics in the place of the declared ones. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo_es.config.ages import AGE_FORM, parse_age_ms
from schemas.catalog import topic_spec
from schemas.topic import Cleanup

FOREVER = "forever"
_FORM = f"expected topic=age[,topic=age], an age being {AGE_FORM}, or {FOREVER}: requests=24h"


def parse_topic_retention(text: str) -> Mapping[str, int | None]:
    """Retention in ms (None: for ever) by topic name without namespace.

    Raises:
        ValueError: Says what is expected, or why the topic takes no age.
    """
    ages: dict[str, int | None] = {}
    for part in text.split(","):
        name, equals, age = (word.strip() for word in part.partition("="))
        if not equals:
            raise ValueError(_FORM)
        _check_topic(name)
        if name in ages:
            raise ValueError(f"{name} is given twice")
        ages[name] = None if age == FOREVER else parse_age_ms(age)
    return ages


def check_topic_retention(text: str) -> None:
    """The check of the option."""
    parse_topic_retention(text)


def _check_topic(name: str) -> None:
    try:
        spec = topic_spec(name)
    except KeyError as error:
        raise ValueError(error.args[0]) from error
    if spec.cleanup is Cleanup.COMPACTION:
        raise ValueError(f"{name} keeps the newest record of each key and nothing by age")

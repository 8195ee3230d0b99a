from __future__ import annotations

import pytest

from dynamo_es.config.text_checks import (
    check_endpoint,
    check_host,
    check_log_url,
    check_metrics_prefix,
    check_name,
    check_namespace,
    check_path,
    check_topic_namespace,
    without_secrets,
)

GOOD = [
    (check_host, ["localhost", "0.0.0.0", "::", "::1", "fe80::1%eth0", "::ffff:10.0.0.1", "a-b.example.com", "pod_1"]),
    (check_topic_namespace, ["dynamo", "a.b_c-D9", "x" * 200]),
    (check_name, ["demo", "meta-llama/Llama-3.1-8B", "模型 7", "x" * 256]),
    (check_namespace, ["dynamo", "ns-1", "dynamo_cloud"]),
    (check_endpoint, ["dynamo.backend.generate", "dyn://a.b.c"]),
    (check_metrics_prefix, ["dynamo_frontend", "_x", "a:b"]),
    (check_path, ["/x", "x", "builtin:bytes", "a~b"]),
    (
        check_log_url,
        [
            "embedded:///x",
            "embedded:x/y",
            "embedded:///a%23b?durability=fsync",
            "kafka://a:1,b:2",
            "memory://x",
            "q://x",
        ],
    ),
]
BAD = [
    (check_host, ["a b", "http://x", "1.2.3.4:80", "a..b", "-a", "*", "x" * 64, "x." * 130 + "x", "[::1]", "é.fr"]),
    (check_topic_namespace, ["a/b", "a b", "x" * 201, "é"]),
    (check_name, [" demo", "demo ", "x" * 257]),
    (check_namespace, ["a.b", "a b", "a/b"]),
    (check_endpoint, ["a.b", "a..c", "a.b.c.d", "a b.c.d", "a/b.c.d", "http://a.b.c"]),
    (check_metrics_prefix, ["1x", "a-b", "a b"]),
    (check_path, ["~/x", "~me/x"]),
    (
        check_log_url,
        ["/x", "x", "kafka://[::1", "embedded:///a#b", "embedded:~/x", "embedded://~/x", "embedded:///~/x",
         "embedded:///a%00b"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("check", "texts"), GOOD, ids=lambda value: getattr(value, "__name__", ""))
def test_accepted(check, texts):
    for text in texts:
        check(text)


@pytest.mark.parametrize(("check", "texts"), BAD, ids=lambda value: getattr(value, "__name__", ""))
def test_refused(check, texts):
    for text in texts:
        with pytest.raises(ValueError):
            check(text)


def test_a_path_in_place_of_a_url_is_answered_with_the_url():
    with pytest.raises(ValueError, match="embedded:///var/log"):
        check_log_url("/var/log")


def test_without_secrets():
    assert (
        without_secrets("kafka://u:p@h:1?sasl_plain_password=p%26q&x=1")
        == "kafka://***@h:1?sasl_plain_password=***&x=1"
    )
    assert without_secrets("/models/a@b") == "/models/a@b"

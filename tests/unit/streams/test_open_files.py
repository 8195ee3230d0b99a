from __future__ import annotations

import pytest

from streams.open_files import limit_to_ask_for


@pytest.mark.parametrize(
    ("partitions", "soft", "hard", "limit"),
    [
        (20, 1024, 524_288, None),
        (256, 1024, 524_288, 8448),
        (256, 1024, -1, 8448),
        (256, 1024, 4096, 4096),
        (256, 8448, 8448, None),
        (256, -1, -1, None),
    ],
)
def test_a_worker_asks_for_as_many_open_files_as_its_partitions_need(partitions, soft, hard, limit):
    assert limit_to_ask_for(partitions, soft, hard) == limit

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dynamo_es.frontend.template import ChatRenderer
from dynamo_es.frontend.tokenizer import Tokenizer
from dynamo_es.frontend.tokenizer_files import load_tokenizer

MODEL_DIR = Path(__file__).parents[2] / "data" / "models" / "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def smollm() -> tuple[Tokenizer, ChatRenderer]:
    tokenizer, renderer = load_tokenizer(str(MODEL_DIR))
    assert renderer is not None
    return tokenizer, renderer


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool

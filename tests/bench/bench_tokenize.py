"""Tokenizing a growing chat: every turn anew, and with the cache of what stands between special tokens.

The two take turns, each on a chat of its own, so that whatever else the machine does meets both alike. With fastokens
installed it is measured beside them, without the cache; it keeps what it knows of words from chat to chat.
"""

from __future__ import annotations

import os
import time
from importlib.util import find_spec
from pathlib import Path
from random import Random

from dynamo_es.frontend.template import ChatRenderer
from dynamo_es.frontend.tokenizer import Tokenizer
from dynamo_es.frontend.tokenizer_backends import TokenizerOptions
from dynamo_es.frontend.tokenizer_files import load_tokenizer
from tests.bench.spread import Row, rounds

MODEL = Path(__file__).parents[1] / "data" / "models" / "smollm2-135m-instruct"
TURNS = 20
WORDS = 400
ROUNDS = int(os.environ.get("BENCH_TOKENIZE_ROUNDS", "7"))


def chats(random: Random, renderer: ChatRenderer) -> list[str]:
    """The prompts of one chat, turn after turn; words are made up, so that no two chats share many."""

    def says(role: str) -> dict[str, str]:
        words = ("".join(random.choices("etaoinshrdlucmfwyp", k=random.randint(2, 9))) for _ in range(WORDS))
        return {"role": role, "content": " ".join(words)}

    messages, prompts = [says("system")], []
    for _ in range(TURNS):
        messages.append(says("user"))
        prompts.append(renderer.render(messages, add_generation_prompt=True))
        messages.append(says("assistant"))
    return prompts


def tokenize(tokenizer: Tokenizer, prompts: list[str]) -> tuple[float, float, list[int]]:
    """Milliseconds of a whole chat and of its last turn, and the ids of that."""
    began = last = time.perf_counter()
    ids: list[int] = []
    for prompt in prompts:
        last = time.perf_counter()
        ids = tokenizer.encode(prompt, False)
    ended = time.perf_counter()
    return (ended - began) * 1000, (ended - last) * 1000, ids


def main() -> list[Row]:
    """Figures, as the benchmarks' table shows them."""
    makes = {"without cache": TokenizerOptions(cache_bytes=0), "with cache": TokenizerOptions()}
    if find_spec("fastokens") is not None:
        makes["fastokens without cache"] = TokenizerOptions("fastokens", fallback=False, cache_bytes=0)
    loaded = {name: load_tokenizer(str(MODEL), options=options) for name, options in makes.items()}
    random = Random(7)
    whole: dict[str, list[float]] = {name: [] for name in loaded}
    last: dict[str, list[float]] = {name: [] for name in loaded}
    length = 0
    for _ in range(ROUNDS):
        prompts = chats(random, next(iter(loaded.values()))[1] or _no_template())
        seen: list[list[int]] = []
        for name, (tokenizer, _) in loaded.items():
            took, end, ids = tokenize(tokenizer, prompts)
            whole[name].append(took)
            last[name].append(end)
            seen.append(ids)
        assert all(ids == seen[0] for ids in seen)
        length = len(seen[0])
    rows: list[Row] = [("tokens of the last turn", length, "tokens")]
    for name in loaded:
        rows += rounds(f"{TURNS} turns, {name}", whole[name], "ms")
        rows += rounds(f"last turn, {name}", last[name], "ms")
    for what, values in (("turns", whole), ("last turn", last)):
        for name in list(loaded)[1:]:
            ratios = [slow / fast for slow, fast in zip(values["without cache"], values[name], strict=True)]
            rows += rounds(f"{what}: times as fast {name}", ratios, "x")
    return rows


def _no_template() -> ChatRenderer:
    raise SystemExit(f"{MODEL} has no chat template")


if __name__ == "__main__":
    for what, value, unit in main():
        print(f"{what:<55} {value:10.2f} {unit}")

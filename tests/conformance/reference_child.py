"""Plays scripts on ``dynamo.llm``: one JSON line in, one JSON line out, until the input ends.

Run by the interpreter that has ai-dynamo-runtime installed, which need not have anything else.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys

from dynamo import llm
from script_player import play


def main() -> None:
    """Serve until the input ends. The first line out tells the version of the reference."""
    # Whatever the runtime prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    version = importlib.metadata.version("ai-dynamo-runtime")
    print(json.dumps({"version": version}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(play(llm, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()

"""The table of options in the README: ``python -m dynamo_es.config.document [--check] README.md``."""

from __future__ import annotations

import sys
from pathlib import Path

from dynamo_es.cli.config import TREE
from dynamo_es.config.options import reference

BEGIN = "<!-- options: begin (written by make docs) -->"
END = "<!-- options: end -->"


def with_reference(text: str) -> str:
    """``text`` with the present table between the marks. Raises ValueError if a mark is missing."""
    before, rest = text.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    return f"{before}{BEGIN}\n\n{reference(TREE)}\n\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Write the file, or with ``--check`` say whether it is current."""
    check = "--check" in arguments
    path = Path(next(argument for argument in arguments if not argument.startswith("--")))
    text = path.read_text()
    current = with_reference(text)
    if check:
        if text != current:
            sys.stderr.write(f"{path}: the table of options is stale; run make docs\n")
        return int(text != current)
    path.write_text(current)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

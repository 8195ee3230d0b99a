"""One metrics page of several processes: each sample gets a label that says whose it is. Pure."""

from __future__ import annotations

from collections.abc import Mapping

LABEL = "frontend_process"
"""Index of the process, from 0; there are at most as many values as ``--workers``."""


def merge_pages(pages: Mapping[int, str]) -> str:
    """The pages (Prometheus text format) as one: families stay together, as the format asks."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for index, page in sorted(pages.items()):
        family = ""
        for line in page.split("\n"):
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                head = heads.setdefault(family, [])
                if index == min(pages) or line not in head:
                    head.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, index))
    lines = [line for family, head in heads.items() for line in (*head, *samples.get(family, ()))]
    return "".join(f"{line}\n" for line in (*samples.get("", ()), *lines))


def _labelled(line: str, index: int) -> str:
    name, brace, rest = line.partition("{")
    label = f'{LABEL}="{index}"'
    if brace:
        return f"{name}{{{label}{'' if rest.startswith('}') else ','}{rest}"
    name, _, value = line.partition(" ")
    return f"{name}{{{label}}} {value}"

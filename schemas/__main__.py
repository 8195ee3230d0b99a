"""``python -m schemas`` writes the generated documents beside this file; ``--check`` only says which are stale."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from schemas.catalog import TOPICS
from schemas.documents import build_documents


def stale_documents(folder: Path, documents: dict[str, str]) -> list[str]:
    """Names of documents that are missing, differ, or belong to no topic any more; sorted."""
    stale = {name for name, text in documents.items() if _read(folder / name) != text}
    left_over = {f"json/{path.name}" for path in (folder / "json").glob("*.schema.json")} - documents.keys()
    return sorted(stale | left_over)


def write_documents(folder: Path, documents: dict[str, str]) -> list[str]:
    """Bring ``folder`` up to date; returns the names that changed."""
    changed = stale_documents(folder, documents)
    for name in changed:
        path = folder / name
        if name not in documents:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(documents[name], encoding="utf-8")
    return changed


def main(arguments: Sequence[str] | None = None, folder: Path | None = None) -> int:
    """Exit status: 1 if ``--check`` found stale documents."""
    parser = argparse.ArgumentParser(prog="python -m schemas", description="Write the documents of all topics.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 and name what is stale")
    check: bool = parser.parse_args(arguments).check
    folder = folder or Path(__file__).parent
    documents = build_documents(TOPICS)
    names = stale_documents(folder, documents) if check else write_documents(folder, documents)
    for name in names:
        sys.stdout.write(f"{'stale' if check else 'written'}: schemas/{name}\n")
    if check and names:
        sys.stdout.write("run: python -m schemas\n")
        return 1
    return 0


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


if __name__ == "__main__":
    sys.exit(main())

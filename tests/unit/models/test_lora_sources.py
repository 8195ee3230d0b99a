"""The allow-list of adapters' URIs: nothing outside it is read, however a request writes it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dynamo_es.models import lora_sources
from dynamo_es.models.lora_sources import LoraSources, SourceRefused, check_source


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "loras"
    (root / "poet").mkdir(parents=True)
    (tmp_path / "loras-of-others").mkdir()
    (tmp_path / "secret").mkdir()
    return root


def test_a_folder_under_an_allowed_one_is_taken_without_links(root: Path) -> None:
    sources = LoraSources([f"file://{root}/"])
    (root / "newest").symlink_to(root / "poet")
    real = os.path.realpath(root)
    assert sources.resolve(f"file://{root}/poet") == f"file://{real}/poet"
    assert sources.resolve(f"file://{root}/newest") == f"file://{real}/poet"
    assert sources.resolve(f"file://{root}/x/../poet") == f"file://{real}/poet"
    assert sources.resolve(f"file://{root}/none") == f"file://{real}/none"


@pytest.mark.parametrize("tail", ["/../secret", "-of-others", "/out", "/out/deeper", "/poet/../../secret"])
def test_what_lies_outside_is_refused(root: Path, tail: str) -> None:
    (root / "out").symlink_to(root.parent / "secret")
    with pytest.raises(SourceRefused, match="no --lora-source"):
        LoraSources([f"file://{root}"]).resolve(f"file://{root}{tail}")


def test_a_path_outside_is_not_even_looked_at(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr(os.path, "realpath", looked.append)
    with pytest.raises(SourceRefused):
        LoraSources([f"file://{root}"]).resolve("file:///etc")
    assert not looked


@pytest.mark.parametrize(
    "uri",
    ["", "poet", "/srv/poet", "file://srv/poet", "http://h/poet", "file:///srv/a\0b", "s3://b/%2e%2e/x", "s3://b/a b"],
)
def test_other_forms_are_refused(uri: str) -> None:
    with pytest.raises(SourceRefused):
        LoraSources(["file:///srv", "s3://b"]).resolve(uri)


def test_without_a_list_nothing_is_allowed(root: Path) -> None:
    for uri in (f"file://{root}", "s3://b/x", "hf://o/r"):
        with pytest.raises(SourceRefused):
            LoraSources([]).resolve(uri)


def test_remote_ones_begin_with_whole_names() -> None:
    sources = LoraSources(["s3://b/loras/", "hf://org", "hf://other/repo"])
    for uri in ("s3://b/loras/x", "s3://b/loras", "hf://org/any@main", "hf://other/repo@v2", "hf://other/repo"):
        assert sources.resolve(uri) == uri
    for uri in (
        "s3://b/loras2/x",
        "s3://b/loras/../x",
        "s3://b",
        "hf://organ/x",
        "hf://other/repo2",
        "s3://bb/loras/x",
    ):
        with pytest.raises(SourceRefused):
            sources.resolve(uri)


@pytest.mark.parametrize(
    "text", ["x", "file://x", "file:///", "s3://", "http://h", "file:///a b", "file:///a/../b", "hf:///"]
)
def test_what_no_allow_list_has(text: str) -> None:
    with pytest.raises(ValueError, match="expected file:///FOLDER"):
        check_source(text)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "sub/more.txt", "sub"])
def test_a_file_that_is_a_link_out_of_the_folder_is_refused(root: Path, name: str) -> None:
    entry = root / "poet" / name
    entry.parent.mkdir(exist_ok=True)
    secret = root.parent / "secret"
    entry.symlink_to(secret if name == "sub" else secret / "key")
    with pytest.raises(SourceRefused, match=f"its '{name}' is a link"):
        LoraSources([f"file://{root}"]).resolve(f"file://{root}/poet")
    # To another allowed folder it may lead.
    sources = LoraSources([f"file://{root}", f"file://{secret}"])
    assert sources.resolve(f"file://{root}/poet") == f"file://{os.path.realpath(root)}/poet"


def test_files_that_are_links_within_the_folder_are_taken(root: Path) -> None:
    """As in a hub's cache, whose snapshots are links to its blobs."""
    (root / "blob").write_text("{}")
    (root / "poet/adapter_config.json").symlink_to("../blob")
    assert LoraSources([f"file://{root}"]).resolve(f"file://{root}/poet").endswith("/poet")


def test_what_was_replaced_by_a_link_is_refused_when_it_is_looked_at_again(root: Path) -> None:
    sources = LoraSources([f"file://{root}"])
    real = sources.resolve(f"file://{root}/poet")
    (root / "poet").rmdir()
    (root / "poet").symlink_to(root.parent / "secret")
    with pytest.raises(SourceRefused):
        sources.resolve(real)


def test_a_folder_of_very_many_files_is_no_adapter(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_sources, "_MAX_FILES", 2)
    for number in range(3):
        (root / f"poet/{number}").write_text("")
    with pytest.raises(SourceRefused, match="more than 2 files"):
        LoraSources([f"file://{root}"]).resolve(f"file://{root}/poet")

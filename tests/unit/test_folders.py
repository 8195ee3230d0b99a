from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dynamo_es.folders import obstacle, why_not_made


def test_nothing_is_in_the_way(tmp_path):
    assert obstacle(tmp_path) is None
    assert obstacle(tmp_path / "a" / "b") is None
    assert list(tmp_path.iterdir()) == []


def test_a_relative_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert obstacle(Path("a/b")) is None
    assert obstacle(Path("file/b")) == f"{tmp_path}/file is not a folder"


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").touch()
    for place in ("file", "file/a", "file/a/b"):
        assert obstacle(tmp_path / place) == f"{tmp_path}/file is not a folder"


def test_links(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "good").symlink_to(tmp_path / "real")
    (tmp_path / "broken").symlink_to(tmp_path / "no")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert obstacle(tmp_path / "good" / "a") is None
    assert f"{tmp_path}/broken is a link to something that is not there" in obstacle(tmp_path / "broken" / "a")
    assert os.strerror(errno.ELOOP) in obstacle(tmp_path / "circle" / "a")


def test_a_name_that_is_too_long(tmp_path):
    assert os.strerror(errno.ENAMETOOLONG) in obstacle(tmp_path / ("a" * 300))


@pytest.mark.parametrize(
    ("flags", "expected"), [(0, "this user may not write to {}"), (os.ST_RDONLY, "{} is on a read-only file system")]
)
def test_a_folder_that_may_not_be_written(tmp_path, monkeypatch, flags, expected):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(os, "statvfs", lambda path: type("Found", (), {"f_flag": flags}))
    assert obstacle(tmp_path / "a" / "b") == expected.format(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_permissions_of_a_parent(tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    (tmp_path / "sealed").mkdir(mode=0o000)
    try:
        for name in ("closed", "sealed"):
            assert obstacle(tmp_path / name / "a" / "b") == f"this user may not write to {tmp_path}/{name}"
    finally:
        (tmp_path / "sealed").chmod(0o700)


def test_what_can_only_be_seen_by_trying(tmp_path):
    """/proc and /sys let nobody make a folder, and their errors mislead."""
    folder = tmp_path / "a" / "b"
    for code, reason in ((errno.ENOENT, "its file system takes no folders"), (errno.EPERM, os.strerror(errno.EPERM))):
        error = OSError(code, os.strerror(code))
        assert why_not_made(folder, error) == f"no folder can be made in {tmp_path} ({reason})"
    (tmp_path / "a").touch()
    assert why_not_made(folder, FileExistsError(errno.EEXIST, "File exists")) == f"{tmp_path}/a is not a folder"

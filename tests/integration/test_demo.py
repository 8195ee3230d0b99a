"""``dynamo-es demo``: a fleet that answers, and that leaves nothing behind however it ends."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from dynamo_es.cli.scratch import LOCK_NAME, PREFIX, remove_abandoned, scratch_folder


def start_demo(tmp_path, *arguments):
    """A demo that is up, what it printed, and its children."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dynamo_es.cli.main", "demo", "--workers", "2", *arguments],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path), "DYN_ES_TOPIC_NAMESPACE": "x"},
    )  # fmt: skip
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "until Ctrl-C" in line:
            break
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
    return process, "".join(lines), [int(number) for number in found.stdout.split()]


def running(number):
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(number)], capture_output=True, text=True, check=False)
    return found.stdout.strip()[:1] not in ("", "Z")


def wait_ended(numbers, timeout_s):
    deadline = time.monotonic() + timeout_s
    while left := [number for number in numbers if running(number)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.crash
def test_the_demo_answers_and_leaves_no_process_behind(tmp_path):
    process, text, children = start_demo(tmp_path, "--dir", str(tmp_path / "kept % folder"))
    try:
        assert len(children) == 3
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.stdout.close()
    assert text.count("overlap") == 5
    assert "decision requests[" in text
    wait_ended(children, 0)
    assert (tmp_path / "kept % folder" / "log" / "log.json").exists()


@pytest.mark.crash
def test_a_demo_that_is_killed_takes_its_fleet_along_and_the_next_one_cleans_up(tmp_path):
    process, text, children = start_demo(tmp_path)
    try:
        folder = next(tmp_path.glob(f"{PREFIX}*"))
        assert remove_abandoned(tmp_path) == []
        # A stream under way: a process that drains would wait for it.
        base = re.search(r"frontend (http://\S+)", text)[1]
        body = {"model": "demo", "stream": True, "max_tokens": 30_000, "messages": [{"role": "user", "content": "Hi"}]}
        request = urllib.request.Request(
            f"{base}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.readline().startswith(b"data:")
            process.kill()
            process.wait(10)
            wait_ended(children, 20)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert folder.exists()
    process, text, _ = start_demo(tmp_path, "--once")
    try:
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.stdout.close()
    assert f"removed  {folder}, left behind by a demo that was killed\n" in text
    assert list(tmp_path.iterdir()) == []


def test_a_tethered_process_ends_even_if_it_will_not(tmp_path):
    code = (
        "import os, signal, sys, threading, time\n"
        "from dynamo_es.cli import tether\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "tether.GRACE_S = 0.1\n"
        "threading.Thread(target=tether.end_with_parent, args=(0,), daemon=True).start()\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "up\n"
        process.stdin.close()
        assert process.wait(20) == -signal.SIGKILL
    finally:
        process.kill()
        process.stdout.close()


def test_only_folders_of_dead_demos_are_removed(tmp_path):
    def make(name, lock=LOCK_NAME):
        folder = tmp_path / name
        (folder / "log").mkdir(parents=True)
        (folder / "log" / "data").write_text("x")
        if lock:
            (folder / lock).touch()
        return folder

    dead = [make(f"{PREFIX}a"), make(f"{PREFIX}b")]
    kept = [
        make("mine"),
        make("x-dynamo-es-demo-a"),
        make(f"{PREFIX}nolock", lock=None),
        make(f"{PREFIX}notyet", lock=f".{LOCK_NAME}"),
        make(f"{PREFIX}link", lock=None),
        make(f"{PREFIX}pipe", lock=None),
        make(f"{PREFIX}dir", lock=None),
        tmp_path / f"{PREFIX}file",
        tmp_path / f"{PREFIX}symlink",
    ]
    (tmp_path / f"{PREFIX}link" / LOCK_NAME).symlink_to(tmp_path / "mine" / LOCK_NAME)
    os.mkfifo(tmp_path / f"{PREFIX}pipe" / LOCK_NAME)
    (tmp_path / f"{PREFIX}dir" / LOCK_NAME).mkdir()
    (tmp_path / f"{PREFIX}file").write_text("x")
    (tmp_path / f"{PREFIX}symlink").symlink_to(tmp_path / "mine")
    with scratch_folder(tmp_path) as alive:
        assert remove_abandoned(tmp_path) == dead
        kept.append(alive.path)
        assert sorted(tmp_path.iterdir()) == sorted(kept)
        assert (tmp_path / "mine" / "log" / "data").exists()
    assert not alive.path.exists()


def test_a_folder_is_in_use_as_long_as_any_process_holds_its_lock(tmp_path):
    folder = tmp_path / f"{PREFIX}a"
    folder.mkdir()
    with (folder / LOCK_NAME).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        child = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock.fileno()], text=True
        )
    try:
        assert remove_abandoned(tmp_path) == []
        child.communicate("\n", timeout=60)
        assert remove_abandoned(tmp_path) == [folder]
    finally:
        child.kill()


def test_a_folder_where_nothing_can_be_listed_is_left_alone(tmp_path):
    assert remove_abandoned(tmp_path / "no") == []

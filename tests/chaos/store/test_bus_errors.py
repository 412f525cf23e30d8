"""Tests of unreadable pages: an unreadable page of a mapped file ends the process by SIGBUS. The next process reports
the failure, and checks that the files are readable before it opens the store."""

from __future__ import annotations

import errno
import faulthandler
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from actors.replica.failed_disk import FATAL_FILE, QUIET_S, RESTART_INTERVAL_S, BusErrors, open_pause_s
from raymq.common.errors import StoreError
from storage.files import disk
from tests.support.stores.stores import bodies_of, open_store

MESSAGES = 50
PROGRAM = f"""
import os, shutil, sys
from pathlib import Path
from actors.replica.failed_disk import BusErrors
from tests.support.stores.stores import bodies_of, make_batch, open_store

root = Path(sys.argv[1])
errors = BusErrors(root)
errors.require_readable([root])
store = open_store(root)
if not bodies_of(store):
    store.append([make_batch([b"%03d" % number for number in range({MESSAGES})])])
[log, *_] = sorted((root / "commitlog").iterdir())
shutil.copy(log, root.parent / "intact")
os.truncate(log, 0)  # a page behind a file's end is SIGBUS, as a page that the disk cannot read
store.append([make_batch([b"one more"])])
print("not reached")
"""


@pytest.fixture
def bus_errors() -> Iterator[Callable[..., BusErrors]]:
    """Yield a function that creates a BusErrors object for a store directory, and closes the object that it created
    before. This simulates consecutive processes. At the end pytest's own fault handler is enabled again."""
    with ExitStack() as made:

        def make(root: Path, **more: Any) -> BusErrors:
            made.close()
            errors = BusErrors(root, **more)
            made.callback(errors.close)
            return errors

        yield make
    assert sys.__stderr__ is not None
    faulthandler.enable(sys.__stderr__)


def end_by_bus_error(root: Path) -> str:
    """Run a process that ends by SIGBUS while it uses the store in `root`. The store's files are restored afterwards.
    Returns the process's error output."""
    repository = Path(__file__).parents[3]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(root)],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == -signal.SIGBUS, ended.stderr
    assert "not reached" not in ended.stdout
    [log, *_] = sorted((root / "commitlog").iterdir())
    shutil.copy(root.parent / "intact", log)
    return ended.stderr


def test_the_next_process_logs_the_stack_reads_the_files_and_opens_the_store(
    tmp_path: Path, bus_errors: Callable[..., BusErrors], caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "store"
    end_by_bus_error(root)
    errors = bus_errors(root)
    assert errors.count == 1
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "Fatal Python error: Bus error" in record.getMessage()
    assert "log_writer.py" in record.getMessage(), "the stack says where"
    errors.require_readable([root])
    assert "files were read without an error" in caplog.text
    store = open_store(root)
    try:
        assert bodies_of(store) == [b"%03d" % number for number in range(MESSAGES)]
    finally:
        store.close()
    errors.forget()
    assert bus_errors(root).count == 0


def test_a_file_that_cannot_be_read_by_calls_either_keeps_the_store_closed_with_a_sentence(
    tmp_path: Path, bus_errors: Callable[..., BusErrors], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "store"
    end_by_bus_error(root)
    real = disk.pread

    def pread(descriptor: int, size: int, position: int) -> bytes:
        if "/commitlog/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, size, position)

    errors = bus_errors(root)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "pread", pread)
        for _ in range(2):
            with pytest.raises(StoreError, match=r"commitlog/0* cannot be read from byte 0 on.*raymq drain"):
                errors.require_readable([root])
    # the disk can be read again (the patch of `pread` has ended), so `require_readable` raises no error
    errors.require_readable([root])
    errors.forget()


def test_processes_that_end_again_and_again_open_the_store_later_each_time(
    tmp_path: Path, bus_errors: Callable[..., BusErrors]
) -> None:
    root, now_s = tmp_path / "store", 1000.0
    end_by_bus_error(root)
    end_by_bus_error(root)
    errors = bus_errors(root, clock_s=lambda: now_s)
    with pytest.raises(StoreError, match=r"2 processes in a row ended by a bus error.*opens again in 15 s"):
        errors.require_readable([root])
    now_s += RESTART_INTERVAL_S
    errors.require_readable([root])
    assert [open_pause_s(count) for count in (1, 2, 3, 4)] == [0.0, 15.0, 30.0, 60.0]
    assert open_pause_s(10**6) == QUIET_S


def test_another_fatal_error_is_logged_once_and_delays_nothing(
    tmp_path: Path, bus_errors: Callable[..., BusErrors], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FATAL_FILE).write_text("Fatal Python error: Segmentation fault\n\nCurrent thread …")
    for count in range(2):
        errors = bus_errors(tmp_path, check=lambda directories: pytest.fail("nothing is to be checked"))
        errors.require_readable([tmp_path])
        assert caplog.text.count("Segmentation fault") == 1, count

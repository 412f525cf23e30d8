"""Tests of the checkpoint directory of the windowed-counts job: to which count it belongs, and whether it is closed."""

from __future__ import annotations

from pathlib import Path

import pytest

from raydp_jobs.jobs import count_checkpoint
from raydp_jobs.jobs.count_checkpoint import CountState, check_open, fix_options, state_of
from raydp_jobs.stream.progress import StreamOffsets, WindowClosing
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageQueue

QUEUE = MessageQueue("orders", "a", 0)


def write_batch(checkpoint: Path, number: int, closing: WindowClosing, *, done: bool = True) -> Path:
    """Write the files of a batch as Spark does. `done`: the batch has finished. Returns the file of offsets."""
    for name in ("offsets", "commits"):
        (checkpoint / name).mkdir(exist_ok=True)
    path = checkpoint / f"offsets/{number}"
    path.write_text(f'v1\n{{"batchWatermarkMs":0}}\n{StreamOffsets({QUEUE: 7}, closing=closing).to_json()}')
    (checkpoint / f"offsets/.{number}.crc").write_bytes(b"crc")
    if done:
        (checkpoint / f"commits/{number}").write_text('v1\n{"nextBatchWatermarkMs":0}')
    return path


def test_a_checkpoint_is_closed_after_its_last_batch(tmp_path: Path) -> None:
    assert state_of(tmp_path / "none") is CountState.OPEN
    assert state_of(tmp_path) is CountState.OPEN
    for number in range(8, 12):
        write_batch(tmp_path, number, WindowClosing.NO)
        assert state_of(tmp_path) is CountState.OPEN
        check_open(tmp_path)
    write_batch(tmp_path, 12, WindowClosing.ROW)
    write_batch(tmp_path, 13, WindowClosing.LAST, done=False)
    assert state_of(tmp_path) is CountState.CLOSING
    with pytest.raises(InvalidArgumentError, match=r"is closing: .* repeat the run with --close .* another checkpoint"):
        check_open(tmp_path)
    write_batch(tmp_path, 13, WindowClosing.LAST)
    assert state_of(tmp_path) is CountState.CLOSED
    with pytest.raises(InvalidArgumentError, match=rf"{tmp_path} is closed: .* use another checkpoint directory"):
        check_open(tmp_path)


@pytest.mark.parametrize("done", [True, False])
def test_a_checkpoint_with_the_moved_watermark_only_is_closing(tmp_path: Path, done: bool) -> None:
    write_batch(tmp_path, 0, WindowClosing.NO)
    write_batch(tmp_path, 1, WindowClosing.ROW, done=done)
    assert state_of(tmp_path) is CountState.CLOSING


def test_other_files_and_directories_are_no_batches(tmp_path: Path) -> None:
    write_batch(tmp_path, 3, WindowClosing.NO)
    (tmp_path / "offsets/9").mkdir()
    for name in ("9.tmp", ".9.0a1b.tmp", "٩", "9" * 30):
        (tmp_path / "offsets" / name).write_text("no offsets")
    assert state_of(tmp_path) is CountState.OPEN


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"v1",
        b"v2\n{}\n{}",
        b"v1\n{}\n-",
        b'v1\n{}\n{"logOffset":0}',
        b"v1\n{}\n\xff",
        b"v1\n{}\n" + b"x" * 2000,
        b"v1\n{}\n" + StreamOffsets({QUEUE: 7}).to_json().encode() + b"\n{}",
    ],
)
def test_a_damaged_file_of_offsets_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(count_checkpoint, "_OFFSETS_BYTES_MAX", 1000)
    path = write_batch(tmp_path, 3, WindowClosing.NO)
    assert state_of(tmp_path) is CountState.OPEN
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=rf"{path} is not a file of offsets .* another checkpoint directory"):
        state_of(tmp_path)


def test_a_checkpoint_whose_offsets_are_no_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "offsets").write_text("a file")
    with pytest.raises(InvalidArgumentError, match=rf"{tmp_path}/offsets cannot be read: Not a directory"):
        state_of(tmp_path)


def test_a_checkpoint_is_of_one_count(tmp_path: Path) -> None:
    fix_options(tmp_path / "c", {"by": "tags", "length_s": 60})
    fix_options(tmp_path / "c", {"length_s": 60, "by": "tags"})
    with pytest.raises(InvalidArgumentError, match=r"belongs to another count \(length_s=60\)"):
        fix_options(tmp_path / "c", {"by": "tags", "length_s": 300})
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["raymq-windowed-counts.json"]

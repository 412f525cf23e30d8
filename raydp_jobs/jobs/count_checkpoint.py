"""The checkpoint directory of a windowed-counts job: to which count it belongs, and whether the count is closed.

    CHECKPOINT/raymq-windowed-counts.json    describes the count: topics, target and time windows
    CHECKPOINT/offsets/17                    Spark's file of batch 17; its last line is a StreamOffsets
    CHECKPOINT/commits/17                    exists after batch 17

The module uses no Spark, so that a job can look at its checkpoint before it starts Spark.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from raydp_jobs.stream.progress import StreamOffsets, WindowClosing
from raymq.common.errors import InvalidArgumentError

OPTIONS_FILE: Final = "raymq-windowed-counts.json"
"""Name of the file in a checkpoint directory that describes the time windows of the query."""
_OFFSETS_BYTES_MAX: Final = 64 << 20
"""Maximum size of a file of offsets in bytes. The size does not depend on the number of messages: about 40 bytes for
each queue."""
_SPARK_VERSION: Final = "v1"
"""First line of a file of offsets: the version of Spark's format."""
_BATCH: Final = re.compile("[0-9]{1,18}")


class CountState(StrEnum):
    """The state of a count. A closed count has sent the counts of all its time windows.

    `OPEN`: further messages are counted. `CLOSING`: a run has begun to close the count, and was interrupted. `CLOSED`:
    all counts are sent. A count that is closing or closed counts no further message.
    """

    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


def state_of(checkpoint: Path) -> CountState:
    """Read from a checkpoint whether its count is closed. A checkpoint without a batch is open.

    Raises InvalidArgumentError if the newest file of offsets cannot be read, or is not a file of this job.
    """
    batch = max(_batches(checkpoint / "offsets"), default=None)
    if batch is None:
        return CountState.OPEN
    closing = _read_offsets(checkpoint / "offsets" / str(batch)).closing
    if closing is WindowClosing.NO:
        return CountState.OPEN
    done = closing is WindowClosing.LAST and (checkpoint / "commits" / str(batch)).exists()
    return CountState.CLOSED if done else CountState.CLOSING


def check_open(checkpoint: Path) -> None:
    """Raise InvalidArgumentError if no further message can be counted from a checkpoint, or if `state_of` raises it."""
    state = state_of(checkpoint)
    if state is CountState.OPEN:
        return
    why = (
        "a run with --close has sent the counts of all its time windows, so no window is left for a later message"
        if state is CountState.CLOSED
        else "a run with --close was interrupted: repeat the run with --close to send the remaining counts"
    )
    raise InvalidArgumentError(
        f"checkpoint {checkpoint} is {state}: {why}. To count later messages, use another checkpoint directory"
    )


def _batches(directory: Path) -> Iterator[int]:
    """Yield the numbers of the batches that have a file in `directory`; none if the directory does not exist."""
    try:
        with os.scandir(directory) as entries:
            yield from (int(entry.name) for entry in entries if _BATCH.fullmatch(entry.name) and entry.is_file())
    except FileNotFoundError:
        return
    except OSError as error:
        raise InvalidArgumentError(f"the checkpoint's directory {directory} cannot be read: {error.strerror}") from None


def _read_offsets(path: Path) -> StreamOffsets:
    """Read a file of offsets that Spark wrote for a query with one source."""
    try:
        with path.open("rb") as file:
            content = file.read(_OFFSETS_BYTES_MAX + 1)
        lines = content.decode().rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(path, str(error)) from None
    # The lines are the version, a JSON object of Spark, and the offset of the query's only source.
    if len(content) > _OFFSETS_BYTES_MAX or len(lines) != 3 or lines[0] != _SPARK_VERSION:
        raise _damaged(path, f"it has {len(content)} bytes and {len(lines)} lines, and begins with {lines[0][:20]!r}")
    try:
        return StreamOffsets.from_json(lines[2])
    except InvalidArgumentError as error:
        raise _damaged(path, str(error)) from None


def _damaged(path: Path, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the checkpoint's file {path} is not a file of offsets of a windowed-counts job: {reason}. Restore the "
        "checkpoint from a copy, or use another checkpoint directory"
    )


def fix_options(checkpoint: Path, options: dict[str, Any]) -> None:
    """Store a description of the query's time windows in its checkpoint. If the checkpoint already has a description,
    compare the two.

    Without this comparison, Spark would continue with the old windows although the new description states other
    windows. Raises InvalidArgumentError if the descriptions differ.
    """
    checkpoint.mkdir(parents=True, exist_ok=True)
    path, text = checkpoint / OPTIONS_FILE, json.dumps(options, sort_keys=True)
    if not path.exists():
        partial = checkpoint / f".{uuid.uuid4().hex}.partial"
        partial.write_text(text)
        try:
            # Create the file with the query's options (topics, target and time windows) as a hard link to a complete
            # file. The link appears completely or not at all, and never replaces a file that another process created
            # first.
            os.link(partial, path)
        except FileExistsError:
            pass
        finally:
            partial.unlink()
    compare_options(checkpoint, options)


def compare_options(checkpoint: Path, options: dict[str, Any]) -> None:
    """Compare the query's options (topics, target and time windows) with the options that the checkpoint stores. Does
    nothing if the checkpoint stores no options. Raises InvalidArgumentError if the options differ."""
    path = checkpoint / OPTIONS_FILE
    if not path.exists():
        return
    noted, given = json.loads(path.read_text()), json.loads(json.dumps(options))
    other = {name: value for name, value in noted.items() if given.get(name) != value}
    if other:
        told = ", ".join(f"{name}={value}" for name, value in sorted(other.items()))
        raise InvalidArgumentError(
            f"checkpoint {checkpoint} belongs to another count ({told}): use a separate directory for each count"
        )

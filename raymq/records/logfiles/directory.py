"""Names of the folders and files in a store directory (spec/storage.md §2, §5)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

CONSUME_QUEUE_DIR: Final = "consumequeue"
CONSUME_QUEUE_EXT_DIR: Final = "consumequeue_ext"
BATCH_CONSUME_QUEUE_DIR: Final = "batchconsumequeue"


def file_name(start: int) -> str:
    """Return the name of the file whose first byte is at offset `start`: 20 decimal digits (spec/storage.md
    §1)."""
    return f"{start:020d}"


def batch_queue_directory(root: Path | str, topic: str, queue_id: int) -> Path:
    """Return the directory with the files of a batch consume queue."""
    return Path(root) / BATCH_CONSUME_QUEUE_DIR / topic / str(queue_id)

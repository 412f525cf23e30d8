"""A file to which a listener writes one line per message. The file is still there after the listener's process has
ended."""

from __future__ import annotations

import os
from pathlib import Path

from raymq.common.message import MessageExt


class ListenerNotes:
    """A listener that appends each message's body to a file. If the listener runs in another process, it opens the file
    by its path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def __call__(self, message: MessageExt) -> None:
        self.write(message.body.decode())

    def write(self, line: str) -> None:
        """Append a line to the file with one write call."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, f"{line}\n".encode())
        finally:
            os.close(descriptor)

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines()

    def numbers(self) -> list[int]:
        return sorted(int(line) for line in self.lines())

    def distinct_numbers(self) -> list[int]:
        """Return the numbers in the file in ascending order, each number once.

        A number may be in the file twice: if a queue moves to another consumer instance, the queue's last messages may
        be delivered again. On a loaded machine a queue may move at any time.
        """
        return sorted(set(self.numbers()))

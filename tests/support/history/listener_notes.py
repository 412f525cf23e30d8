"""A listener's notes in a file, which survive the listener's process, line by line."""

from __future__ import annotations

import os
from pathlib import Path

from raymq.common.message import MessageExt


class ListenerNotes:
    """A listener that notes each message's body. Other processes get it by its path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def __call__(self, message: MessageExt) -> None:
        self.write(message.body.decode())

    def write(self, line: str) -> None:
        """Append a whole line."""
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
        """Return the numbers without repeats.

        A queue that moves to another instance repeats its last messages. On a loaded machine any queue may move.
        """
        return sorted(set(self.numbers()))

"""A listener's notes in a file: what it heard outlives its process, line by line."""

from __future__ import annotations

import os
from pathlib import Path

from raymq.common.message import MessageExt


class ListenerNotes:
    """As a listener it notes each message's body. It travels to other processes by its path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def __call__(self, message: MessageExt) -> None:
        self.write(message.body.decode())

    def write(self, line: str) -> None:
        """Note a line, whole, at the end."""
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
        """The numbers without repeats. A queue that moves to another instance has its last messages heard again: on a
        loaded machine that may happen to any group."""
        return sorted(set(self.numbers()))

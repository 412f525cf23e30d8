"""The progress of the verification of a store's files, which survives a restart.

On disk
    scrub           1a2b3c4d                    the CRC-32 of the next line
                    {"began_ms": …, "section": "log", "position": "1073741824", …}

The file is a convenience. If it is lost or damaged, the verification begins anew, and nothing else is affected.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Final

import msgspec

from raymq.common.protocol.store import Hole
from raymq.records.format.crc import crc32
from storage.files import disk

SCRUB_FILE: Final = "scrub"
HOLES_MAX_KEPT: Final = 1000
"""Maximum number of damaged log ranges that a verification lists, to count how many of them are repaired later."""
UNREPAIRED_MAX: Final = 20
"""Maximum number of descriptions of damage outside of the log that a verification keeps."""

logger = logging.getLogger(__name__)


class ScrubProgress(msgspec.Struct, kw_only=True):
    """The current or last verification of one store. Times are in ms since 1970; 0 means never."""

    waiting_since_ms: int = 0
    """When the store first waited for a verification. Until one is complete, its age counts from this time."""
    began_ms: int = 0
    """When the current or last verification began."""
    section: str = ""
    """The kind of files that the current verification reads; empty if no verification runs."""
    position: str = ""
    """The position in the section at which the verification continues. Each section has its own format."""
    checked_bytes: int = 0
    total_bytes: int = 0
    section_bytes: dict[str, int] = {}
    """Number of bytes of each section at the beginning of the verification."""
    found: int = 0
    """Number of damaged places that the verification found, and how many of them it repaired at once."""
    repaired: int = 0
    holes: list[tuple[int, int]] = []
    """Physical offset and size of the damaged log ranges that the verification found."""
    unrepaired: list[str] = []
    completed: int = 0
    """Number of complete verifications."""
    completed_ms: int = 0
    verified_from_ms: int = 0
    """When the last complete verification began."""

    def begin(self, now_ms: int, section: str, section_bytes: dict[str, int]) -> None:
        """Begin a verification, with the section `section`. Discards the progress of the current one."""
        self.began_ms, self.section, self.position = now_ms, section, ""
        self.section_bytes, self.total_bytes = section_bytes, sum(section_bytes.values())
        self.checked_bytes = self.found = self.repaired = 0
        self.holes, self.unrepaired = [], []

    def complete(self, now_ms: int) -> None:
        """End the verification: each section was read."""
        self.section = self.position = ""
        self.completed += 1
        self.completed_ms, self.verified_from_ms = now_ms, self.began_ms

    def note_holes(self, holes: tuple[Hole, ...]) -> None:
        """Record damaged log ranges that the verification found."""
        self.found += len(holes)
        self.holes += [(hole.offset, hole.size) for hole in holes[: max(HOLES_MAX_KEPT - len(self.holes), 0)]]

    def note_unrepaired(self, text: str) -> bool:
        """Record damage that is not repaired. Returns True if the description is new."""
        if text in self.unrepaired or len(self.unrepaired) >= UNREPAIRED_MAX:
            return False
        self.unrepaired.append(text)
        return True

    def closed_holes(self, holes: tuple[Hole, ...]) -> int:
        """Return how many of the damaged log ranges that the verification found are gone from the table `holes`."""
        return sum(
            not any(one.offset < offset + size and offset < one.end_offset for one in holes)
            for offset, size in self.holes
        )


def read_progress(root: Path) -> ScrubProgress:
    """Read the progress of the store in directory `root`. A missing, damaged or unreadable file is an empty
    progress."""
    path = root / SCRUB_FILE
    try:
        crc, _, text = path.read_bytes().partition(b"\n")
        if crc != b"%08x" % crc32(text):
            raise ValueError("the file does not match its checksum")
        return msgspec.convert(json.loads(text), ScrubProgress)
    except FileNotFoundError:
        return ScrubProgress()
    except (OSError, ValueError, msgspec.ValidationError) as error:
        logger.warning("file %s is not used (%s): the verification of the store begins anew", path, error)
        return ScrubProgress()


def write_progress(root: Path, progress: ScrubProgress) -> None:
    """Replace the progress file of the store in directory `root`. On return it is on disk. Raises OSError if the disk
    fails or is full."""
    text = msgspec.json.encode(progress)
    disk.replace_file(root / SCRUB_FILE, b"%08x\n" % crc32(text) + text)

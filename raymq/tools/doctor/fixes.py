"""The repairs of `raymq doctor --fix`, on this machine only: permissions, and directories that are not there yet.

Each is safe while servers run and can be taken back by hand. No file's content is touched, and nothing is deleted.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Final

from raymq.tools.doctor.collect.disk import readable_by_others
from raymq.tools.doctor.facts import MachineFacts

PRIVATE_DIRECTORY: Final = 0o700


def fix(machine: MachineFacts) -> list[str]:
    """Repair what the facts about this machine show; returns a line for each repair, or for one that failed."""
    done = []
    if machine.token_mode is not None and machine.token_mode & 0o077:
        done.append(_make_private(Path(machine.token_path)))
    for directory in machine.directories:
        path = Path(directory.path)
        if not directory.exists and not directory.error:
            done.append(_make_directory(path))
        elif directory.readable_count:
            done += _make_all_private(path)
    return done


def _make_directory(path: Path) -> str:
    try:
        path.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    except OSError as error:
        return f"could not make {path}: {error}"
    return f"made {path}, mode {PRIVATE_DIRECTORY:04o}"


def _make_private(path: Path) -> str:
    """Take the permissions of other users from a file or directory."""
    try:
        before = stat.S_IMODE(path.stat().st_mode)
        path.chmod(before & 0o700)
    except OSError as error:
        return f"could not change the mode of {path}: {error}"
    return f"{path}: mode {before:04o} is {before & 0o700:04o} now"


def _make_all_private(root: Path) -> list[str]:
    """Take them from everything below a directory; one line for all, and one for each that could not be changed."""
    lines = [_make_private(path) for path in list(readable_by_others(root))]
    failed = [line for line in lines if line.startswith("could not")]
    changed = len(lines) - len(failed)
    return ([f"{root}: other users may no longer use {changed:,} files and directories"] if changed else []) + failed

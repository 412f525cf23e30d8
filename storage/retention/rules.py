"""The rules of retention (spec/storage.md §9): they select the log files to delete, and delete nothing themselves.

The inputs are the time, the disk usage and the log files. The result is a list of files to delete and whether the disk
counts as full. It does not matter whether the messages were consumed. Files younger than their reserved time stay, and
a full disk refuses appends instead. With clean_file_forcibly_enable a full disk deletes young files, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from raymq.common.config.store import StoreOptions
from storage.files.disk_usage import UNKNOWN_USAGE

HOUR_MS: Final = 3_600_000


class LogFile(NamedTuple):
    """A commit log file: its start and end as physical offsets, and the time of its last write."""

    start: int
    end: int
    modified_ms: int


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """Retention settings, as ratios and ms."""

    # Hours of the day, in local time, in which expired files are deleted (delete_when).
    delete_hours: frozenset[int]
    # Age in ms up to which a log file is kept.
    reserved_ms: int
    # Used share of a disk above which expired log files are deleted at any hour.
    max_used_ratio: float
    # Used share of a disk above which log files younger than their reserved time are deleted too, if `forcibly` is
    # True.
    clean_forcibly_ratio: float
    # Used share of a disk above which the disk counts as full and the store refuses appends.
    warning_ratio: float
    # True if log files younger than their reserved time may be deleted when the disk is nearly full.
    forcibly: bool
    # Maximum number of log files that one run of the cleaner deletes.
    batch_max: int

    @classmethod
    def from_settings(cls, settings: StoreOptions) -> RetentionRules:
        """Build the retention rules from a store's settings. Values outside of RocketMQ's bounds are replaced by the
        nearest bound."""
        return cls(
            frozenset(int(hour) for hour in settings.delete_when.split(";")),
            settings.file_reserved_time_hours * HOUR_MS,
            _clamp(settings.disk_max_used_space_ratio, 10, 95),
            settings.clean_forcibly_ratio,
            _clamp(settings.disk_space_warning_level_ratio, 35, 90),
            settings.clean_file_forcibly_enable,
            settings.delete_file_batch_max,
        )

    @property
    def critical_ratio(self) -> float:
        """Used share of a disk above which the store also refuses chunks of messages from a master. It is halfway
        between `warning_ratio` and a full disk."""
        return (1 + self.warning_ratio) / 2


def _clamp(percent: int, low: int, high: int) -> float:
    return min(max(percent, low), high) / 100


@dataclass(frozen=True, slots=True)
class RetentionDecision:
    """The result of `decide`: the log files to delete, and whether the disk counts as full."""

    # The log files to delete, oldest first.
    delete: tuple[LogFile, ...]
    # True if the disk is so full that the store must refuse appends now.
    disk_full: bool
    # Reason why log files are deleted now, for the log message; empty if no files must be deleted.
    reason: str
    # True if the disk is so full that the store must also refuse chunks of messages from a master.
    disk_critical: bool
    # Physical offset of the first log file that is deleted before its reserved time has passed; None if there is no
    # such file.
    young_from: int | None = None


def decide(
    files: Sequence[LogFile],
    rules: RetentionRules,
    *,
    now_ms: int,
    local_hour: int,
    usages: Iterable[float],
    by_hand: bool,
    disk_full: bool,
    keep_from: int,
    reserved_from: int,
) -> RetentionDecision:
    """Decide which log files to delete now. `files`: all files of the log, from the oldest on.

    `usages`: the used share of each disk partition of the store; negative if unknown. `by_hand`: True if a run was
    requested. `disk_full`: the result of the last decision. `keep_from`: the physical offset from which all messages
    are still needed, whatever their age. `reserved_from`: the physical offset of the first message that must be kept
    because its topic's reserved time is longer than the store's. Files that end after this offset do not count as
    expired. Never deletes the last file, nor a file after a file that is kept.
    """
    known = list(usages)
    fullest = max(known, default=UNKNOWN_USAGE)
    full, critical = is_full(fullest, rules, disk_full=disk_full)
    at_once = fullest > rules.clean_forcibly_ratio
    over = fullest > rules.max_used_ratio or any(usage < 0 for usage in known)
    if by_hand:
        reason = "asked for by hand"
    elif over:
        reason = f"the disk is {fullest:.0%} full"
    elif local_hour in rules.delete_hours:
        reason = f"it is {local_hour} o'clock"
    else:
        return RetentionDecision((), full, "", critical)
    doomed: list[LogFile] = []
    young_from: int | None = None
    for file in files[:-1]:
        expired = now_ms >= file.modified_ms + rules.reserved_ms and file.end <= reserved_from
        if len(doomed) == rules.batch_max or file.end > keep_from or not (expired or (at_once and rules.forcibly)):
            break
        if not expired and young_from is None:
            young_from = file.start
        doomed.append(file)
    return RetentionDecision(tuple(doomed), full, reason, critical, young_from)


def is_full(fullest: float, rules: RetentionRules, *, disk_full: bool) -> tuple[bool, bool]:
    """Return two truth values: if a disk is too full for messages, and if it is even too full for a master's chunks.

    `fullest`: the used share of the disk. `disk_full`: True if the last check found the disk full. In this case the
    disk counts as full until its usage is below the next lower level.
    """
    full = fullest > rules.warning_ratio or (disk_full and fullest > rules.clean_forcibly_ratio)
    return full, fullest > rules.critical_ratio

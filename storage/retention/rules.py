"""Which log files to delete: the rules of spec/storage.md §9, and nothing but the rules.

Time, the disk's usage and the files come in as arguments; the answer is a list of files and whether the disk counts as
full. Nobody asks whether the messages were consumed. Files younger than their reserved time stay, and a full disk
refuses appends instead, unless clean_file_forcibly_enable says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from raymq.config.store import StoreOptions
from storage.files.disk_usage import UNKNOWN_USAGE

HOUR_MS: Final = 3_600_000


class LogFile(NamedTuple):
    """A commit-log file: where it starts and ends, and when it was written last."""

    start: int
    end: int
    modified_ms: int


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """The settings, as ratios and ms. `from_settings` puts them into RocketMQ's bounds."""

    delete_hours: frozenset[int]
    reserved_ms: int
    max_used_ratio: float
    clean_forcibly_ratio: float
    warning_ratio: float
    forcibly: bool
    batch_max: int

    @classmethod
    def from_settings(cls, settings: StoreOptions) -> RetentionRules:
        return cls(
            frozenset(int(hour) for hour in settings.delete_when.split(";")),
            settings.file_reserved_time_hours * HOUR_MS,
            _clamp(settings.disk_max_used_space_ratio, 10, 95),
            settings.clean_forcibly_ratio,
            _clamp(settings.disk_space_warning_level_ratio, 35, 90),
            settings.clean_file_forcibly_enable,
            settings.delete_file_batch_max,
        )


def _clamp(percent: int, low: int, high: int) -> float:
    return min(max(percent, low), high) / 100


@dataclass(frozen=True, slots=True)
class RetentionDecision:
    """`delete`: the files to delete, oldest first. `disk_full`: whether appends are to be refused from now on.
    `reason`: why files are deleted now, for the log; empty when it is not the time for it. `young_from`: where the
    first of the deleted files starts that is younger than its reserved time, None if there is none."""

    delete: tuple[LogFile, ...]
    disk_full: bool
    reason: str
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
) -> RetentionDecision:
    """What to do now with `files`, all of the log's, oldest first.

    `usages`: of each partition the store is on. `by_hand`: somebody asked for a run. `disk_full`: what the last
    decision said. `keep_from`: the physical offset from which on everything is still needed, whatever its age.
    The last file is never deleted, nor one behind a file that is kept.
    """
    known = list(usages)
    fullest = max(known, default=UNKNOWN_USAGE)
    full = fullest > rules.warning_ratio or (disk_full and fullest > rules.clean_forcibly_ratio)
    at_once = fullest > rules.clean_forcibly_ratio
    over = fullest > rules.max_used_ratio or any(usage < 0 for usage in known)
    if by_hand:
        reason = "asked for by hand"
    elif over:
        reason = f"the disk is {fullest:.0%} full"
    elif local_hour in rules.delete_hours:
        reason = f"it is {local_hour} o'clock"
    else:
        return RetentionDecision((), full, "")
    doomed: list[LogFile] = []
    young_from: int | None = None
    for file in files[:-1]:
        expired = now_ms >= file.modified_ms + rules.reserved_ms
        if len(doomed) == rules.batch_max or file.end > keep_from or not (expired or (at_once and rules.forcibly)):
            break
        if not expired and young_from is None:
            young_from = file.start
        doomed.append(file)
    return RetentionDecision(tuple(doomed), full, reason, young_from)

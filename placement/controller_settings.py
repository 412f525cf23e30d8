"""What the Controller is told when it is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from placement.election import ControlRules
from placement.storage_plan import StoragePlan


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """`groups`: broker group to its replicas. `journal`: the file, on the disk of the node it is pinned to.

    `storages`: every replica as it was planned at first, below `data_dir` of its node: what it is repaired from."""

    journal: Path
    groups: Mapping[str, frozenset[int]]
    priorities: Mapping[str, Mapping[int, int]]
    learners: Mapping[str, frozenset[int]]
    rules: ControlRules
    data_dir: Path
    storages: tuple[StoragePlan, ...]

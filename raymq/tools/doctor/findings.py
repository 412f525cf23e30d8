"""The outcome of checks: what was seen, how bad it is, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from raymq.tools.doctor.facts import DoctorSnapshot

HERE: Final = "here"
"""The place of a finding about the machine that the command runs on."""


PLACES_SHOWN: Final = 5
"""The most places that one row names."""


class State(Enum):
    """SKIP: the check needs something that does not run. WARN: it works, and is likely to hurt one day. FAIL: something
    does not work, or a message may be lost or read by strangers."""

    SKIP = "skip"
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict of one check at one place: a machine's address, an actor, a group, or empty for the whole."""

    check: str
    state: State
    seen: str
    do: str = ""
    where: str = ""


Judge = Callable[[DoctorSnapshot], list[Finding]]


@dataclass(frozen=True, slots=True)
class Check:
    """A check with its name, and the part of the snapshot without which it is skipped: "machine", "nodes", "cluster" or
    "prometheus"."""

    name: str
    needs: str
    judge: Judge


def finding(state: State, seen: str, do: str = "", where: str = "") -> Finding:
    """A finding whose check is named by the one who runs it."""
    return Finding("", state, seen, "" if state is State.OK else do, where)


def ok(seen: str, where: str = "") -> Finding:
    """All is well."""
    return finding(State.OK, seen, where=where)


def warn(seen: str, do: str, where: str = "") -> Finding:
    """It works, and is likely to hurt one day."""
    return finding(State.WARN, seen, do, where)


def fail(seen: str, do: str, where: str = "") -> Finding:
    """Something does not work, or is in danger."""
    return finding(State.FAIL, seen, do, where)


def run_checks(checks: Iterable[Check], snapshot: DoctorSnapshot) -> list[Finding]:
    """The findings of all checks, in their order; of a check whose subject is not there, one that says so."""
    # The advice behind a reason's first words is for those who need a cluster now.
    missing = {
        "nodes": "" if snapshot.nodes else snapshot.ray_error.partition(": ")[0] or "no Ray cluster runs",
        "cluster": "" if snapshot.cluster else snapshot.cluster_error.partition(": ")[0] or "no raymq runs",
        "prometheus": "" if snapshot.prometheus else "no Prometheus is named with --prometheus",
    }
    found: list[Finding] = []
    for check in checks:
        reason = missing.get(check.needs, "")
        results = [finding(State.SKIP, reason)] if reason else check.judge(snapshot)
        found += [replace(result, check=check.name) for result in results]
    return found


def folded(findings: Sequence[Finding]) -> list[Finding]:
    """The findings, each of several alike ones of a check merged into one. `where` counts the places of what is well,
    and names up to PLACES_SHOWN places of anything else."""
    rows: dict[tuple[str, State, str, str], list[Finding]] = {}
    for one in findings:
        seen = "" if one.state is State.OK else one.seen
        rows.setdefault((one.check, one.state, seen, one.do), []).append(one)
    return [alike[0] if len(alike) == 1 else replace(alike[0], where=_places(alike)) for alike in rows.values()]


def _places(alike: Sequence[Finding]) -> str:
    """The places of findings that are alike otherwise, for one row."""
    if alike[0].state is State.OK:
        return f"{len(alike)} places"
    more = len(alike) - PLACES_SHOWN
    return ", ".join(one.where for one in alike[:PLACES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def worst(findings: Iterable[Finding]) -> State:
    """The worst state among the findings; OK if there is none."""
    order = list(State)
    return max((one.state for one in findings), key=order.index, default=State.OK)

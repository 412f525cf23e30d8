"""The findings of checks: what a check saw, how bad it is, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from raymq.tools.doctor.facts import DoctorSnapshot

HERE: Final = "here"
"""The place of a finding about the machine on which the command runs."""
PLACES_SHOWN: Final = 5
"""The most places in one row."""


class State(Enum):
    """SKIP: the check needs a server that does not run. WARN: a likely cause of later faults. FAIL: a part does not
    work, or a message may be lost or read by strangers."""

    SKIP = "skip"
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check at one place: a machine's address, an actor or a group; empty for the whole cluster."""

    check: str
    state: State
    seen: str
    do: str = ""
    where: str = ""


Judge = Callable[[DoctorSnapshot], list[Finding]]


@dataclass(frozen=True, slots=True)
class Check:
    """A check with its name. It is skipped if the snapshot lacks `needs`: "machine", "nodes", "cluster" or
    "prometheus"."""

    name: str
    needs: str
    judge: Judge


def finding(state: State, seen: str, do: str = "", where: str = "") -> Finding:
    """Return a finding without the name of its check, which `run_checks` adds."""
    return Finding("", state, seen, "" if state is State.OK else do, where)


def ok(seen: str, where: str = "") -> Finding:
    """Return a finding that the check passed."""
    return finding(State.OK, seen, where=where)


def warn(seen: str, do: str, where: str = "") -> Finding:
    """Return a finding about a likely cause of later faults."""
    return finding(State.WARN, seen, do, where)


def fail(seen: str, do: str, where: str = "") -> Finding:
    """Return a finding about a part that does not work, or about messages in danger."""
    return finding(State.FAIL, seen, do, where)


def run_checks(checks: Iterable[Check], snapshot: DoctorSnapshot) -> list[Finding]:
    """Return the findings of all checks, in order. A skipped check has one finding with the reason."""
    # A reason's text after the colon is advice for a user who needs a cluster, which the doctor does not.
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
    """Merge equal findings of a check at several places into one finding.

    `where` of a merged finding is the number of places if the check passed, else the names of the first places.
    """
    rows: dict[tuple[str, State, str, str], list[Finding]] = {}
    for one in findings:
        seen = "" if one.state is State.OK else one.seen
        rows.setdefault((one.check, one.state, seen, one.do), []).append(one)
    return [alike[0] if len(alike) == 1 else replace(alike[0], where=_places(alike)) for alike in rows.values()]


def _places(alike: Sequence[Finding]) -> str:
    """Return the places of equal findings, for one row."""
    if alike[0].state is State.OK:
        return f"{len(alike)} places"
    more = len(alike) - PLACES_SHOWN
    return ", ".join(one.where for one in alike[:PLACES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def worst(findings: Iterable[Finding]) -> State:
    """Return the worst state of the findings; OK if there are no findings."""
    order = list(State)
    return max((one.state for one in findings), key=order.index, default=State.OK)

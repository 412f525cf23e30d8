"""The findings of the doctor's checks: what a check found, how severe it is, and what the user should do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from raymq.tools.doctor.facts import DoctorSnapshot

HERE: Final = "here"
"""Value of a finding's field `where` if the finding is about the machine on which the command runs."""
PLACES_SHOWN: Final = 5
"""Maximum number of places (machines, actors or groups) that one row of findings names."""


class State(Enum):
    """The result of a check. OK: the check passed. SKIP: the check needs a server that does not run. WARN: the check
    found a likely cause of later faults. FAIL: a part of the system does not work, messages may be lost, or other users
    may read them."""

    SKIP = "skip"
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check at one place. `where` names the place: a machine's address, an actor or a group. It is
    empty if the result concerns the whole cluster."""

    check: str
    state: State
    seen: str
    do: str = ""
    where: str = ""


Judge = Callable[[DoctorSnapshot], list[Finding]]


@dataclass(frozen=True, slots=True)
class Check:
    """A check with its name. `needs` names the facts that the check needs: "machine", "nodes", "cluster" or
    "prometheus". The check is skipped if the snapshot does not contain these facts."""

    name: str
    needs: str
    judge: Judge


def finding(state: State, seen: str, do: str = "", where: str = "") -> Finding:
    """Create a finding without the name of its check. `run_checks` adds the check's name."""
    return Finding("", state, seen, "" if state is State.OK else do, where)


def ok(seen: str, where: str = "") -> Finding:
    """Create the finding of a passed check."""
    return finding(State.OK, seen, where=where)


def warn(seen: str, do: str, where: str = "") -> Finding:
    """Create a warning: a finding about a likely cause of later faults."""
    return finding(State.WARN, seen, do, where)


def fail(seen: str, do: str, where: str = "") -> Finding:
    """Create a failure: a finding that a part of the system does not work, or that messages are in danger."""
    return finding(State.FAIL, seen, do, where)


def run_checks(checks: Iterable[Check], snapshot: DoctorSnapshot) -> list[Finding]:
    """Run all checks in order, and return their findings. A skipped check has one finding with the reason."""
    # Each error in the snapshot is a reason, a colon, and advice. Drop the advice: it is for users who need a cluster,
    # but the doctor also works without one.
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
    """Merge the findings of a check that differ only in their places.

    `where` of a merged finding is the number of places if the check passed, else the names of the first places.
    """
    rows: dict[tuple[str, State, str, str], list[Finding]] = {}
    for one in findings:
        seen = "" if one.state is State.OK else one.seen
        rows.setdefault((one.check, one.state, seen, one.do), []).append(one)
    return [alike[0] if len(alike) == 1 else replace(alike[0], where=_places(alike)) for alike in rows.values()]


def _places(alike: Sequence[Finding]) -> str:
    """Return the text for the places in the table row that several equal findings share. If their state is OK, the text
    is the number of places, else the names of the first places."""
    if alike[0].state is State.OK:
        return f"{len(alike)} places"
    more = len(alike) - PLACES_SHOWN
    return ", ".join(one.where for one in alike[:PLACES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def worst(findings: Iterable[Finding]) -> State:
    """Return the worst state of the findings; OK if there are no findings."""
    order = list(State)
    return max((one.state for one in findings), key=order.index, default=State.OK)

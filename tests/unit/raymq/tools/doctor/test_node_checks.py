"""Tests of the checks of `raymq doctor` that compare nodes with each other. Each check has a good and a bad
case."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raymq.tools.doctor.checks.node_checks import NODE_CHECKS
from raymq.tools.doctor.facts import DoctorSnapshot, LaneFacts, MachineFacts, NodeFacts
from raymq.tools.doctor.findings import Finding, State, run_checks

MACHINE = MachineFacts("box", "3.11.7", "2.60.0", "0.1.0", token_digest="abc")
HEAD = NodeFacts("n0", "10.0.0.1", is_head=True, machine=MACHINE, skew_ms=0.0)
OTHER = NodeFacts(
    "n1", "10.0.0.2", machine=MACHINE, skew_ms=3.0, skew_error_ms=20.0, lanes=(LaneFacts("broker-a", "10.0.0.1"),)
)


def findings(*nodes: NodeFacts, here: MachineFacts = MACHINE) -> dict[str, list[Finding]]:
    found = run_checks(NODE_CHECKS, DoctorSnapshot(here, nodes))
    return {check.name: [one for one in found if one.check == check.name] for check in NODE_CHECKS}


def test_equal_nodes_pass_every_check():
    found = findings(HEAD, OTHER)
    assert all(results for results in found.values())
    assert {one.state for results in found.values() for one in results} == {State.OK}


ILL = [
    ("nodes answer", {"machine": None, "error": "no answer within 45 s"}, State.FAIL, "no answer"),
    ("same versions", {"machine": replace(MACHINE, raymq="0.2.0")}, State.FAIL, "raymq 0.2.0, on the head 0.1.0"),
    ("same versions", {"machine": replace(MACHINE, ray="2.61.0")}, State.FAIL, "Ray 2.61.0"),
    ("same token", {"machine": replace(MACHINE, token_digest="")}, State.FAIL, "no token"),
    ("clocks", {"skew_ms": -900.0}, State.WARN, "-900 ms"),
    ("clocks", {"skew_ms": 60_000.0}, State.FAIL, "+60,000 ms"),
    ("clocks", {"skew_ms": 900.0, "skew_error_ms": 500.0}, State.OK, "± 500"),
    ("lanes", {"lanes": (LaneFacts("broker-a", "10.0.0.1", "timed out"),)}, State.FAIL, "broker-a on 10.0.0.1"),
    ("lanes", {"lanes": (LaneFacts("broker-a", "10.0.0.1", "none", has_tcp=False),)}, State.FAIL, "no lane"),
]


@pytest.mark.parametrize(("check", "changes", "state", "seen"), ILL)
def test_a_node_that_differs_in_one_respect_fails_that_check_at_its_address(check, changes, state, seen):
    found = findings(HEAD, replace(OTHER, **changes))
    [one] = [one for one in found[check] if one.where == OTHER.ip]
    assert one.state is state
    assert seen in one.seen
    others = [one for name, results in found.items() for one in results if name != check]
    assert {one.state for one in others} <= {State.OK}


def test_the_token_of_most_nodes_counts_as_the_right_token():
    third = replace(OTHER, node_id="n2", ip="10.0.0.3", machine=replace(MACHINE, token_digest="xyz"))
    states = {one.where: one.state for one in findings(HEAD, OTHER, third)["same token"]}
    assert states == {"10.0.0.1": State.OK, "10.0.0.2": State.OK, "10.0.0.3": State.FAIL}
    here = findings(HEAD, OTHER, here=replace(MACHINE, token_digest="mine"))["same token"]
    assert [one.where for one in here if one.state is State.WARN] == ["here"]


def test_two_nodes_at_one_address_are_two():
    assert [one.state for one in findings(HEAD, replace(OTHER, ip=HEAD.ip))["same token"]] == [State.OK] * 2


def test_a_clock_that_nobody_could_read_is_not_judged():
    assert [one.where for one in findings(HEAD, replace(OTHER, skew_ms=None))["clocks"]] == [HEAD.ip]

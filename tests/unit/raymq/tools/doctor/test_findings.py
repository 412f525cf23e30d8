"""Tests of the findings of `raymq doctor`: checks that are skipped without a cluster, merged findings, and the
command's output and exit code."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from raymq.tools import cli
from raymq.tools.cli.terminal.output import out
from raymq.tools.doctor import examination
from raymq.tools.doctor.examination import CHECKS, examine
from raymq.tools.doctor.facts import DoctorSnapshot, MachineFacts
from raymq.tools.doctor.findings import Finding, State, folded, worst

MACHINE = MachineFacts("box", "3.11.7", "2.60.0", "0.1.0", token_mode=0o600, shm_bytes=8 << 30)
ALONE = DoctorSnapshot(MACHINE, ray_error="no Ray cluster runs", cluster_error="no Ray cluster runs")


def test_without_a_cluster_only_machine_checks_run():
    found = {one.check: one for one in examine(ALONE)}
    skipped = {check.name for check in CHECKS if check.needs != "machine"}
    assert {name for name, one in found.items() if one.state is State.SKIP} == skipped
    assert found["masters"].seen == "no Ray cluster runs"
    assert "--prometheus" in found["alert rules"].seen


def test_names_of_checks_are_unique():
    names = [check.name for check in CHECKS]
    assert len(names) == len(set(names)) > 35


def finding(where: str, state: State = State.OK, seen: str = "", check: str = "disk") -> Finding:
    return Finding(check, state, seen or where, "", where)


def test_places_that_are_alike_are_one_row_and_others_are_not():
    rows = [finding("a"), finding("b"), finding("c", State.FAIL, "full"), finding("d", State.FAIL, "gone")]
    assert [(row.where, row.state) for row in folded(rows)] == [
        ("2 places", State.OK),
        ("c", State.FAIL),
        ("d", State.FAIL),
    ]
    assert len(folded([*rows, finding("a", check="other")])) == 4


def test_a_row_of_several_failures_names_their_places_and_counts_the_rest():
    alike = [Finding("stores undamaged", State.FAIL, "443 damaged bytes", "check", f"storage-{n}") for n in range(7)]
    assert [one.where for one in folded(alike[:2])] == ["storage-0, storage-1"]
    [row] = folded(alike)
    assert row.where == "storage-0, storage-1, storage-2, storage-3, storage-4 and 2 more"


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([], State.OK),
        ([State.SKIP], State.SKIP),
        ([State.OK, State.WARN, State.SKIP], State.WARN),
        ([State.FAIL, State.OK], State.FAIL),
    ],
)
def test_the_worst_state_is_the_verdict(states, expected):
    assert worst([finding("a", state) for state in states]) is expected


@pytest.mark.parametrize(("mode", "code", "state"), [(0o600, 0, "ok"), (0o644, 1, "fail")])
def test_the_command_prints_findings_and_fails_when_one_fails(monkeypatch, mode, code, state):
    monkeypatch.setattr(out, "_width", 200)
    machine = MachineFacts("box", "3.11.7", "2.60.0", "0.1.0", token_mode=mode, token_path="/t", shm_bytes=8 << 30)
    snapshot = DoctorSnapshot(machine, cluster_error="none runs", ray_error="none runs")
    monkeypatch.setattr(examination, "take_snapshot", lambda *arguments: snapshot)
    as_json = CliRunner().invoke(cli.cli, ["doctor", "--json"])
    assert as_json.exit_code == code, as_json.output
    answer = json.loads(as_json.stdout)
    assert answer["state"] == state
    assert {one["check"]: one["state"] for one in answer["findings"]}["token"] == state
    table = CliRunner().invoke(cli.cli, ["doctor"])
    assert table.exit_code == code
    assert "not checked, because none runs: nodes answer" in table.stdout
    assert f"/t, mode {mode:04o}" in table.stdout or f"/t has mode {mode:04o}" in table.stdout


def test_doctor_fix_lists_repairs_and_checks_again(monkeypatch):
    looks = []
    monkeypatch.setattr(examination, "take_snapshot", lambda *arguments: looks.append(1) or ALONE)
    monkeypatch.setattr(examination, "fix", lambda machine: ["made /data, mode 0700"])
    result = CliRunner().invoke(cli.cli, ["doctor", "--fix"])
    assert "fixed: made /data, mode 0700" in result.stdout
    assert len(looks) == 2

"""Tests of the lists of test files that take turns in `make chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import rotation
from tests.rotation import ROTATION, chosen_list, rotated_out

TESTS = Path(rotation.__file__).parent


def test_each_listed_file_exists_and_stands_in_one_list() -> None:
    files = [file for listed in ROTATION for file in listed]
    assert [file for file in files if not (TESTS / file).is_file()] == []
    assert len(files) == len(set(files))


@pytest.mark.parametrize("index", range(len(ROTATION)))
def test_a_run_leaves_out_the_other_lists_only(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    monkeypatch.setenv("RAYMQ_ROTATION", str(index))
    for at, files in enumerate(ROTATION):
        assert [rotated_out(file) for file in files] == [at != index] * len(files)
    assert not rotated_out("chaos/store/test_store_kill.py")


def test_a_call_of_pytest_and_a_run_of_all_leave_out_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYMQ_ROTATION", raising=False)
    assert not any(rotated_out(file) for files in ROTATION for file in files)
    monkeypatch.setenv("RAYMQ_ROTATION", "all")
    assert not any(rotated_out(file) for files in ROTATION for file in files)


def test_the_commit_chooses_one_list() -> None:
    index = chosen_list("commit")
    assert index in range(len(ROTATION))
    assert chosen_list("commit") == index


def test_a_copy_without_its_repository_runs_the_first_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rotation, "__file__", str(tmp_path / "rotation.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert chosen_list.__wrapped__("commit") == 0

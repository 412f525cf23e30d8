"""Tests of SHARING, the list of test modules that share a cluster. Every name in this list must belong to an existing
module."""

from __future__ import annotations

from tests.conftest import RAY_CHAOS, SHARING, TESTS, group_of, shared_by, turn_of


def test_everything_that_shares_a_cluster_exists_starts_ray_and_is_in_one_list() -> None:
    for name, places in SHARING.items():
        for place in places:
            path = TESTS / place
            files = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
            assert files, place
            assert {(shared_by(file), group_of(file)) for file in files} == {(name, "ray")}


def test_other_modules_have_a_cluster_of_their_own() -> None:
    assert shared_by(TESTS / "chaos" / "processes" / "test_reopen.py") == ""
    assert shared_by(TESTS / "integration" / "servers" / "test_access.py") == ""
    assert shared_by(TESTS / "unit" / "test_docs.py") == ""


def test_files_that_share_a_cluster_run_one_after_the_other_in_the_order_of_the_list() -> None:
    alone = [TESTS / "unit" / "test_docs.py", TESTS / "integration" / "servers" / "test_access.py"]
    shared = [TESTS / place for place in SHARING["servers"]]
    assert sorted([*sorted(shared), *alone], key=turn_of) == [*alone, *shared]


def test_every_folder_of_chaos_that_starts_ray_is_listed() -> None:
    """Each folder of chaos tests that starts Ray is listed. A folder that is not listed would run at the same time as
    another cluster, and slow down both."""
    without_ray = {"nodes", "simulation", "store"}
    folders = {path.parent.name for path in (TESTS / "chaos").glob("*/test_*.py")}
    assert folders - without_ray == {folder for _, folder in RAY_CHAOS}

"""The list of modules that share a cluster names modules that there are."""

from __future__ import annotations

from tests.conftest import RAY_CHAOS, SHARING, SHARING_CHAOS, TESTS, shared_by


def test_every_module_that_shares_a_cluster_is_there_and_in_one_list() -> None:
    for name, files in SHARING_CHAOS.items():
        for file in files:
            path = TESTS / "chaos" / file
            assert path.exists(), file
            assert shared_by(path) == name
    assert [folder for folder in SHARING if not (TESTS / "integration" / folder).is_dir()] == []


def test_other_modules_have_a_cluster_of_their_own() -> None:
    assert shared_by(TESTS / "chaos" / "processes" / "test_reopen.py") == ""
    assert shared_by(TESTS / "integration" / "servers" / "test_control_plane.py") == ""
    assert shared_by(TESTS / "unit" / "test_docs.py") == ""


def test_every_folder_of_chaos_that_starts_ray_is_listed() -> None:
    """A folder that is not listed would run beside another cluster, and both would be late."""
    without_ray = {"nodes", "simulation", "store"}
    folders = {path.parent.name for path in (TESTS / "chaos").glob("*/test_*.py")}
    assert folders - without_ray == {folder for _, folder in RAY_CHAOS}

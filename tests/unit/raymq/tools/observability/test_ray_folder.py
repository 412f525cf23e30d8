"""Tests of the function that finds the folder of Ray's Grafana dashboards in the files that Ray writes. If Ray moves
the folder, these tests fail."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.dashboard.modules.metrics import metrics_head
from ray.dashboard.modules.metrics.metrics_head import MetricsHead

from raymq.common.errors import InvalidArgumentError
from raymq.tools.observability.board import BOARD_FILE, make_board
from raymq.tools.observability.ray_folder import (
    METRICS_ROOT_VARIABLE,
    has_board,
    install_board,
    metrics_root,
    watched_folder,
)


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a fake session folder of Ray, in which Ray's dashboard has written nothing yet."""
    context = SimpleNamespace(get_temp_dir=lambda: str(tmp_path), get_session_name=lambda: "session_1")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.delenv(METRICS_ROOT_VARIABLE, raising=False)
    return tmp_path / "session_1"


def start_dashboard(session: Path) -> None:
    """Make Ray's own code write its files for Grafana, as Ray's dashboard does when it starts."""
    config = SimpleNamespace(session_dir=str(session), temp_dir=str(session.parent), session_name=session.name)
    MetricsHead(config)._create_default_grafana_configs()


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # Ray's code does not close a file that it opens
@pytest.mark.parametrize("variable", [None, METRICS_ROOT_VARIABLE, "RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"])
def test_the_board_is_beside_rays_own(
    session: Path, tmp_path: Path, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv(variable, str(tmp_path / "moved"))
    start_dashboard(session)
    assert not has_board()
    done = install_board()
    assert has_board()
    path = Path(done["path"])
    assert done["watched"]
    assert (path.parent / "default_grafana_dashboard.json").exists()
    assert path.is_relative_to(tmp_path / "moved" if variable else session / "metrics")
    start_dashboard(session)
    assert has_board() == path.exists() == (variable == "RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"), (
        "Ray makes its folder anew"
    )
    assert install_board() == done


def test_rays_names_are_as_they_were() -> None:
    assert metrics_head.METRICS_OUTPUT_ROOT_ENV_VAR == METRICS_ROOT_VARIABLE


def test_the_board_is_written_where_ray_will_look(session: Path) -> None:
    done = install_board()
    path = session / "metrics" / "grafana" / "dashboards" / BOARD_FILE
    assert done == {"path": str(path), "watched": False}
    assert json.loads(path.read_text()) == make_board()
    assert [one.name for one in path.parent.iterdir()] == [BOARD_FILE]


def test_an_output_wins_and_must_be_absolute(session: Path, tmp_path: Path) -> None:
    assert install_board(str(tmp_path / "else"))["path"] == str(tmp_path / "else" / BOARD_FILE)
    with pytest.raises(InvalidArgumentError, match="must be an absolute path"):
        install_board("somewhere")


def test_a_folder_that_cannot_be_made_is_refused(session: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgumentError, match="--output"):
        install_board(str(tmp_path / "file" / "below"))


def test_the_root_may_be_elsewhere(session: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(METRICS_ROOT_VARIABLE, str(tmp_path / "moved"))
    assert metrics_root(session) == tmp_path / "moved"


@pytest.mark.parametrize("text", ["", "providers: []", "providers: {", "- 1", "providers: [{options: {}}]"])
def test_files_of_another_layout_are_no_folder(tmp_path: Path, text: str) -> None:
    file = tmp_path / "grafana/provisioning/dashboards/default.yml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert watched_folder(tmp_path) is None

"""Fixtures of the unit tests, which run without Ray: a test that starts Ray fails at once.

The cache of names for shell completion is in a temporary directory of the tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import ray


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a unit test must not start Ray")

    monkeypatch.setattr(ray, "init", refuse)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the shell completion's cache, which all tests share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))

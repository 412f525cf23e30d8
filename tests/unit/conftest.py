"""Unit tests run without Ray: a start of Ray fails at once, instead of taking seconds.

Names for completion are kept in a cache of the tests.
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
    """The directory of caches, which the tests share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))

"""Unit tests run without Ray: what starts it fails at once, instead of taking seconds."""

from __future__ import annotations

import pytest
import ray


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a unit test must not start Ray")

    monkeypatch.setattr(ray, "init", refuse)

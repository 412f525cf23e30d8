from __future__ import annotations

import os

import pytest


@pytest.fixture
def no_flushes(monkeypatch):
    """Flushes return at once: for tests that open many stores and do not look at what is on disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)

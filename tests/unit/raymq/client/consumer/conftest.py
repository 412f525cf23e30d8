"""Fixtures that several test modules of consumers use."""

from __future__ import annotations

import pytest

from raymq.client.consumer.assignment.offset_committer import CommitThreads


@pytest.fixture
def commits():
    """Yield the threads that a consumer uses to read and commit offsets at brokers."""
    threads = CommitThreads()
    yield threads
    threads.close()

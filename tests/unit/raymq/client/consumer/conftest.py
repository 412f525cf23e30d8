"""Fixtures that the tests of consumers share."""

from __future__ import annotations

import pytest

from raymq.client.consumer.assignment.offset_committer import CommitThreads


@pytest.fixture
def commits():
    """Yield the threads that call brokers to read and commit offsets."""
    threads = CommitThreads()
    yield threads
    threads.close()

"""Fixtures of tests that use `machines`: they start raymq on three nodes of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import raymq
from tests.support.clusters.cluster import Sandbox
from tests.support.clusters.nodes import Nodes, nodes


@pytest.fixture(scope="module")
def machines(box: Sandbox) -> Iterator[Nodes]:
    with nodes(box, ("head", "left", "right")) as made:
        yield made


@pytest.fixture(scope="module")
def mq(machines: Nodes) -> Iterator[raymq.Client]:
    with raymq.connect(embedded=True) as client:
        yield client

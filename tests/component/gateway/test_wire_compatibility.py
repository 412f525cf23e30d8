"""Tests that the gateway's messages are the messages of RocketMQ's official Python client, in that client's own
environment."""

from __future__ import annotations

import pytest

from tests.support.cases import chaos_seed
from tests.support.gateway.official import InstallError, compare, official_python, or_skip

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]  # the first run downloads the client

ROUNDS = 20
NEWER = {"field Settings.client_properties", "value Code.INVALID_CLIENT_PROPERTIES"}
"""Parts of the protocol that are newer than the client."""


def test_messages_with_every_field_cross_to_the_official_classes_and_back() -> None:
    """Both kinds of classes are in one process. No descriptor differs, and no random message loses a field."""
    try:
        python = official_python()
    except InstallError as error:
        or_skip(error)
    report = compare(python, chaos_seed(), ROUNDS)
    assert set(report["differences"]) == NEWER
    assert report["compared"] == 65 * ROUNDS
    assert report["lost"] == []

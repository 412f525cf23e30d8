"""Tests of the list of a gateway's clients."""

from __future__ import annotations

import pytest

from raymq.common.errors import SystemBusyError
from raymq.gateway.clients import connected_clients
from raymq.gateway.clients.connected_clients import CLIENT_EXPIRED_S, STREAM_EXPIRED_S, ConnectedClients


def test_a_client_expires_without_heartbeats_but_not_with_a_stream() -> None:
    clients = ConnectedClients()
    for client_id in ("beats", "streams", "silent"):
        clients.active(client_id, 0.0, client_type=2, group="billing")
    clients.stream_opened("streams")
    clients.active("beats", CLIENT_EXPIRED_S, client_type=2, group="")
    assert clients.expire(CLIENT_EXPIRED_S + 1) == ["silent"]
    assert clients.get("silent") is None
    beats = clients.get("beats")
    assert beats is not None
    assert beats.group == "billing"
    clients.stream_closed("streams", 1000.0)
    clients.active("streams", 1001.0, client_type=2, group="")
    clients.expire(1001.0 + STREAM_EXPIRED_S)
    assert clients.get("streams") is not None
    clients.expire(1002.0 + STREAM_EXPIRED_S)
    assert len(clients) == 0
    clients.stream_closed("streams", 2000.0)
    clients.forget("streams")


def test_the_number_of_clients_is_bounded_and_expired_clients_leave_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connected_clients, "CLIENTS_MAX", 2)
    clients = ConnectedClients()
    clients.active("a", 0.0, client_type=1, group="")
    clients.active("b", 50.0, client_type=1, group="")
    with pytest.raises(SystemBusyError, match="2 clients"):
        clients.active("c", 55.0, client_type=1, group="")
    clients.active("b", 55.0, client_type=1, group="")
    assert clients.expire(65.0) == ["a"]
    clients.active("c", 65.0, client_type=1, group="")
    assert (clients.get("a"), len(clients)) == (None, 2)

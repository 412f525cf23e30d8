"""Tests that the kernel accepts the timeouts that a lane (direct connection beside Ray's calls) sets on its
socket."""

from __future__ import annotations

import socket
import struct

import pytest

from raymq.remoting.lane.client import timeval


@pytest.mark.parametrize("timeout_s", [1e-9, 0.5, 4.9999995, 4.99999999999, 5.0, 5.0000001, 86_400.0])
def test_every_timeout_is_one_that_a_socket_takes_and_is_not_shorter(timeout_s: float) -> None:
    one, other = socket.socketpair()
    with one, other:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(timeout_s))
    seconds, microseconds = struct.unpack("ll", timeval(timeout_s))
    assert 0 <= microseconds < 1_000_000
    assert timeout_s < seconds + microseconds / 1e6 <= timeout_s + 2e-6

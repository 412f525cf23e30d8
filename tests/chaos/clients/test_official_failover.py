"""Test of a gateway with RocketMQ's official clients while the master of a broker group of three replicas is killed.

RAYMQ_CHAOS_KILLS (default 1, 10 by `make soak`) sets the number of times that the master is killed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

import raymq
from tests.support.cases import SUMMARY
from tests.support.clusters.cluster import one_group
from tests.support.gateway.gateways import RunningGateway
from tests.support.gateway.official_client import OfficialClient
from tests.support.gateway.official_place import LANGUAGES, Place, check_load
from tests.support.replicas.ray_replicas import RayReplicas

pytestmark = pytest.mark.timeout(900)  # The first run installs the clients.

KILLS = int(os.environ.get("RAYMQ_CHAOS_KILLS", "10" if os.environ.get("RAYMQ_SOAK") == "1" else "1"))
REPLICAS = 3
SETTINGS = one_group("{replicas: 3, spread: false, min_in_sync_replicas: 2}")
MESSAGES_BETWEEN_KILLS = 20


def test_no_message_of_an_official_client_is_lost_when_the_master_is_killed_under_load(
    mq: raymq.Client,
    gateway: RunningGateway,
    clients: Callable[[str], OfficialClient],
    record_property: Callable[[str, object], None],
) -> None:
    """A message may arrive twice only if it was sent or consumed while a master was killed."""
    replicas = RayReplicas("broker-a", REPLICAS)
    replicas.settled()
    places = [Place(mq, clients(language), gateway.endpoints, "failover") for language in LANGUAGES]
    for place in places:
        place.start_load()

    def more_arrive() -> None:
        """Wait until each consumer has new messages."""
        for place in places:
            place.more_consumed(MESSAGES_BETWEEN_KILLS)

    outages = []
    for _ in range(KILLS):
        more_arrive()
        before = replicas.settled()
        killed_ms = time.time_ns() // 1_000_000
        replicas.kill(before["master"])
        replicas.led_after(before["epoch"])
        # the clients' sends and receives succeed again, which may take longer than the election
        more_arrive()
        outages.append((killed_ms, time.time_ns() // 1_000_000))
    report = [check_load(place, outages) for place in places]
    gaps = ", ".join(f"{(served - killed) / 1000:.1f} s" for killed, served in outages)
    record_property(SUMMARY, f"{'; '.join(report)}; messages arrived again after {gaps}")

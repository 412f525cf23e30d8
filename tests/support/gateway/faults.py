"""Kills the processes that a client of a gateway needs: a gateway, the Broker, and the master of the broker group."""

from __future__ import annotations

import random
import time
from collections import Counter

import psutil

from tests.support.clusters.cluster import actor_processes
from tests.support.history.waiting import eventually
from tests.support.replicas.ray_replicas import RayReplicas

KINDS = ("gateway", "broker", "master")


class GatewayFaults:
    """Kills processes. `kills`: the number of kills of each kind."""

    def __init__(self, replicas: RayReplicas, dice: random.Random) -> None:
        self._replicas, self._dice = replicas, dice
        self.kills: Counter[str] = Counter()

    def inject(self, kind: str) -> None:
        """Kill the processes of a kind, and wait for a new master if the master was killed. `kind`: of KINDS, or
        several of them with " and " between them."""
        if "gateway" in kind:
            self._kill("Gateway")
        if "broker" in kind:
            self._kill("Broker")
        if "master" in kind:
            before = self._replicas.settled() if kind == "master" else self._replicas.led()
            self._replicas.kill(before["master"])
            self._replicas.led_after(before["epoch"])
        self.kills.update(kind.split(" and "))
        print(f"{time.monotonic():.2f} killed: {kind}")

    def _kill(self, actor: str) -> None:
        def processes() -> list[psutil.Process]:
            return sorted(actor_processes(actor), key=lambda process: process.pid)

        self._dice.choice(eventually(processes, f"a process of a {actor}")).kill()

"""A broker group whose replicas run on separate nodes (tests.support.clusters.nodes)."""

from __future__ import annotations

from tests.support.clusters.nodes import Nodes
from tests.support.history.waiting import eventually
from tests.support.replicas.ray_replicas import HEAL_TIMEOUT_S, RayReplicas, log_checksum


class PlacedGroup(RayReplicas):
    """A broker group together with the nodes on which its replicas run."""

    def __init__(self, broker_name: str, replicas: int, machines: Nodes) -> None:
        super().__init__(broker_name, replicas)
        self._machines = machines

    def homes(self) -> dict[int, str]:
        """Return the name of the node on which each replica runs; an empty name if the replica has no node. Waits until
        the Controller answers."""
        replicas = eventually(lambda: self.account()["replicas"], "an account of the replicas", HEAL_TIMEOUT_S)
        return {one["replica"]: self._machines.name_of(one["node_id"]) for one in replicas}

    def wait_for_homes(self, names: set[str]) -> None:
        """Wait until the replicas run on exactly these nodes and are in sync."""
        eventually(lambda: set(self.homes().values()) == names, f"replicas on {names}", HEAL_TIMEOUT_S)
        self.settled()

    def lead_from(self, name: str) -> None:
        """Make the replica that runs on the node `name` the master."""
        [replica] = [replica for replica, home in self.homes().items() if home == name]
        self.lead(replica)
        self.settled()

    def assert_equal_logs(self) -> None:
        """Check that all replicas' logs are equal, byte for byte."""
        end = self.equal_end()
        stores = [
            self._machines.data(name) / f"{self._broker_name}-{replica}" for replica, name in self.homes().items()
        ]
        assert end > 0
        assert len({log_checksum(store, end) for store in stores}) == 1

"""The shape of a raymq cluster in Kubernetes: the user's choices, and the raymq settings that follow from them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from raymq.common.errors import InvalidArgumentError
from raymq.common.names import BROKER_GROUPS_MAX
from raymq.common.numbers import NumberRange, check_fields

VOLUMES_MAX: Final = BROKER_GROUPS_MAX
"""Maximum number of volumes in a cluster: one for each broker group."""
REPLICAS_MAX: Final = 3
SPARK_PODS_MAX: Final = 100
STORE_LABEL: Final = "raymq-store"
"""The Ray node label of a node with a volume for stores; its value is the store's number."""
DATA_MOUNT: Final = PurePosixPath("/var/lib/raymq")
SETTINGS_MOUNT: Final = PurePosixPath("/etc/raymq")
GATEWAY_HTTP_PORT: Final = 8082

_SIZE = re.compile(r"[1-9][0-9]*(Gi|Ti)")


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """The shape of a raymq cluster in Kubernetes: its name and image, the number of its stores, and the size of each
    volume, such as "200Gi".

    `storage_class`: None is the Kubernetes cluster's default. `zones`: store N is in zone N modulo the number of
    zones; an empty tuple sets no zones. `gateway`: True serves clients of RocketMQ 5, and HTTP, in all pods of the
    namespace. `spark_pods`: the number of pods that are for Spark's executors only.

    Raises InvalidArgumentError if a value is invalid.
    """

    name: str = "raymq"
    image: str = "raymq:0.2.0"
    stores: int = 3
    size: str = "200Gi"
    storage_class: str | None = None
    zones: tuple[str, ...] = ()
    gateway: bool = False
    spark_pods: int = 0

    def __post_init__(self) -> None:
        check_fields(self, {"stores": NumberRange(1, VOLUMES_MAX), "spark_pods": NumberRange(0, SPARK_PODS_MAX)})
        if not _SIZE.fullmatch(self.size):
            raise InvalidArgumentError(
                f"the size of a volume must be a number of Gi or Ti, such as 200Gi, not {self.size!r}"
            )
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", self.name):
            raise InvalidArgumentError(
                f"{self.name!r} cannot be the name of a RayCluster: use up to 40 lower-case letters, digits "
                "and -, beginning with a letter"
            )

    def settings(self) -> dict[str, Any]:
        """Return the content of raymq.yaml for a cluster of this shape.

        Each store has a broker group, and each broker group has up to three replicas. A message is acknowledged when a
        majority of the replicas has it.
        """
        replicas = min(self.stores, REPLICAS_MAX)
        majority = replicas // 2 + 1
        settings: dict[str, Any] = {
            "data_dir": str(DATA_MOUNT),
            "broker_groups": self.stores,
            "replication": {
                "replicas": replicas,
                "in_sync_replicas": majority,
                "min_in_sync_replicas": majority,
            },
            "placement": {"node_label": STORE_LABEL},
            "console": {
                "enable": True,
                "host": "0.0.0.0",
            },  # The console listens on all addresses of the pod; network.yaml limits access to it.
        }
        if self.gateway:
            # as for the console; pods of the namespace connect without TLS
            settings["gateway"] = {"enable": True, "host": "0.0.0.0", "http_port": GATEWAY_HTTP_PORT, "insecure": True}
        return settings

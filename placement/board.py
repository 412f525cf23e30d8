"""Installing the Grafana board: on the head node, where Ray's files for Grafana are."""

from __future__ import annotations

from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.actor_class import remote_function
from placement.inventory import head_node_id
from raymq.client.cluster.launcher import ProgressCallback
from raymq.common.errors import RaymqError
from raymq.remoting.actor_ref import resolve
from raymq.tools.observability.ray_folder import install_board

INSTALL_TIMEOUT_S: Final = 60.0


def install_on_head(output: str | None = None, timeout_s: float = INSTALL_TIMEOUT_S) -> dict[str, Any]:
    """Have a task on the head node write the board (raymq.tools.observability.ray_folder.install_board); its result.

    A process of the head node, and not this one, has the environment variables that moved Ray's folders.
    """
    strategy = NodeAffinitySchedulingStrategy(head_node_id(), soft=False)
    installed: dict[str, Any] = resolve(
        _remote_install.options(scheduling_strategy=strategy).remote(output), "installing Grafana's board", timeout_s
    )
    return installed


def try_to_install(progress: ProgressCallback) -> None:
    """Install the board as the last step of a start, which does not fail when this does; `progress` hears of it."""
    progress("installing Grafana's board")
    try:
        install_on_head()
    except RaymqError as error:
        progress(f"Grafana's board is not installed: {error}")


_remote_install = ray.remote(num_cpus=0, max_retries=0)(remote_function(install_board))

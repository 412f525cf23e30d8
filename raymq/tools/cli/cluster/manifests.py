"""`raymq metrics` and `raymq k8s`: commands that write files for Grafana, Prometheus and Kubernetes.

`raymq metrics` writes the Grafana dashboard and the alert rules to the folders of Grafana and Prometheus. `raymq k8s`
writes the files with which KubeRay runs raymq.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from raymq.common.names import BROKER_GROUPS_MAX
from raymq.common.numbers import NumberRange
from raymq.tools.cli.entry import cli
from raymq.tools.cli.options import number_option
from raymq.tools.cli.terminal.command import CommandResult, command
from raymq.tools.kubernetes.cluster_shape import SPARK_PODS_MAX


@cli.group()
def metrics() -> None:
    """Install raymq's dashboard in Grafana, and its alert rules in Prometheus."""


@command(metrics)
@click.option("--output", help="Directory on the head node. Default: the directory that Ray's Grafana provider reads.")
def install(address: str | None, output: str | None) -> CommandResult:
    """Write the Grafana dashboard on the head node, into the folder of Ray's own dashboards. `raymq up` does this, too.

    Ray creates this folder anew at each start. Example: raymq metrics install
    """
    from raymq.client.cluster.local_server import install_board

    installed = install_board(output, address)
    unwatched = "Ray's Grafana does not read this folder: add it to a provider of Grafana, or import the file"
    return CommandResult(
        installed,
        f"the dashboard is in {installed['path']} on the head node",
        *([] if installed["watched"] else [unwatched]),
    )


@command(metrics)
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
def export(folder: Path) -> CommandResult:
    """Write dashboard, alert rules, a relabel snippet for RocketMQ's names, a PodMonitor and a PrometheusRule.

    The files are for a separate Prometheus and Grafana. The command needs no cluster. Example: raymq metrics export
    monitoring
    """
    from raymq.tools.observability.export import export as write

    return _written(write(folder))


@cli.group()
def k8s() -> None:
    """Write the files with which KubeRay runs raymq in Kubernetes."""


@command(k8s)
@number_option("--stores", NumberRange(1, BROKER_GROUPS_MAX), "Number of stores, each a pod with a separate volume.", 3)
@click.option("--size", default="200Gi", show_default=True, help="Size of each store's volume.")
@click.option("--name", default="raymq", show_default=True, help="Name of the RayCluster.")
@click.option("--image", default="raymq:0.2.0", show_default=True, help="Image of all pods, built by the Dockerfile.")
@click.option("--storage-class", help="Storage class of the volumes. Default: the cluster's.")
@click.option("--zone", "zones", multiple=True, help="Zone for stores; repeatable.")
@click.option("--gateway", is_flag=True, help="Also serve clients of RocketMQ 5 in all pods of the namespace.")
@number_option(
    "--spark-pods",
    NumberRange(0, SPARK_PODS_MAX),
    "Number of pods for Spark's executors only, 4 CPUs and 16Gi each.",
    0,
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("k8s"),
    show_default=True,
    help="Directory to write to.",
)
def render(
    stores: int,
    size: str,
    name: str,
    image: str,
    storage_class: str | None,
    zones: tuple[str, ...],
    gateway: bool,
    spark_pods: int,
    output: Path,
) -> CommandResult:
    """Write the RayCluster, volume claims, settings, Services, policies, monitoring and Dockerfile.

    Example: raymq k8s render --stores 3 --size 200Gi && kubectl apply --kustomize k8s
    """
    from raymq.tools.kubernetes.cluster_shape import ClusterShape
    from raymq.tools.kubernetes.render import render as write

    shape = ClusterShape(name, image, stores, size, storage_class, zones, gateway, spark_pods)
    return _written(write(shape, output))


def _written(files: Iterable[Path]) -> CommandResult:
    paths = [str(path) for path in files]
    return CommandResult({"files": paths}, *paths)

"""`raymq metrics` and `raymq k8s`: files for Grafana, Prometheus and Kubernetes.

`raymq metrics` puts the Grafana board and the alert rules where Grafana and Prometheus find them. `raymq k8s` writes
the files with which KubeRay runs raymq.
"""

from __future__ import annotations

from pathlib import Path

import click

from raymq.common.names import BROKER_GROUPS_MAX
from raymq.common.numbers import NumberRange
from raymq.tools.cli.terminal.number_type import NumberType
from raymq.tools.cli.terminal.output import Group, address_option, json_option, print_value, say


@click.group(cls=Group)
def metrics() -> None:
    """Put raymq's board into Grafana, and its alert rules into Prometheus."""


@metrics.command("install")
@click.option("--output", help="Write it to this folder of the head node. Default: where Ray's Grafana provider looks.")
@address_option
@json_option
def install(output: str | None, address: str | None, as_json: bool) -> None:
    """Write the Grafana board on the head node, where Ray's own boards are. `raymq up` does it, too.

    Ray makes that folder anew at each start. Example: raymq metrics install
    """
    from raymq.client.cluster.local_server import install_board

    installed = install_board(output, address)

    def tell() -> None:
        say(f"the board is in {installed['path']} on the head node")
        if not installed["watched"]:
            say("Ray's Grafana provider does not look there: name the folder in one of yours, or import the file")

    print_value(as_json, installed, tell)


@metrics.command("export")
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@json_option
def export(folder: Path, as_json: bool) -> None:
    """Write the board, the alert rules, a relabel snippet for RocketMQ's names, a PodMonitor and a PrometheusRule.

    For a Prometheus and a Grafana that are elsewhere; needs no cluster. Example: raymq metrics export monitoring
    """
    from raymq.tools.observability.export import export as write

    paths = [str(path) for path in write(folder)]

    def tell() -> None:
        for path in paths:
            say(path)

    print_value(as_json, {"files": paths}, tell)


@click.group(cls=Group)
def k8s() -> None:
    """Make the files with which KubeRay runs raymq in Kubernetes."""


@k8s.command("render")
@click.option(
    "--stores",
    type=NumberType(NumberRange(1, BROKER_GROUPS_MAX)),
    default=3,
    show_default=True,
    help="Stores, each a pod with a volume of its own.",
)
@click.option("--size", default="200Gi", show_default=True, help="Size of each store's volume.")
@click.option("--name", default="raymq", show_default=True, help="Name of the RayCluster.")
@click.option("--image", default="raymq:0.1.0", show_default=True, help="Image of all pods, made by the Dockerfile.")
@click.option("--storage-class", help="Storage class of the volumes. Default: the cluster's.")
@click.option("--zone", "zones", multiple=True, help="A zone for stores; repeat it for each.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("k8s"),
    show_default=True,
    help="Folder to write to.",
)
@json_option
def render(
    stores: int,
    size: str,
    name: str,
    image: str,
    storage_class: str | None,
    zones: tuple[str, ...],
    output: Path,
    as_json: bool,
) -> None:
    """Write the RayCluster, volume claims, settings, Service, NetworkPolicy, monitoring and Dockerfile.

    Example: raymq k8s render --stores 3 --size 200Gi && kubectl apply --kustomize k8s
    """
    from raymq.tools.kubernetes.cluster_shape import ClusterShape
    from raymq.tools.kubernetes.render import render as write

    shape = ClusterShape(name, image, stores, size, storage_class, zones)
    paths = [str(path) for path in write(shape, output)]

    def tell() -> None:
        for path in paths:
            say(path)

    print_value(as_json, {"files": paths}, tell)

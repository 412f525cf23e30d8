"""One benchmark program for every fast or large operation of raymq: `make bench`, or

    python -m tests.bench [--rounds 5] [--scale 1.0] [--only SECTION …] [--peers redis nats ray] [--json FILE]
                          [--markdown FILE]

The benchmark starts its own raymq on this machine (ASYNC_FLUSH, then SYNC_FLUSH) and the installed peers, and prints a
table. With --json or --markdown the benchmark also writes the table's measurements to a file. With default options the
benchmark takes about half an hour on two cores. Absolute times depend on the machine and its load; each ratio compares
two measurements of one round. A reached goal shows "yes".
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from importlib.metadata import distributions, version
from pathlib import Path

from rich.console import Console

from tests.bench import (
    copies,
    memory,
    produce,
    requests,
    scale as many,
    scrub,
    spark,
    stores,
    trace,
)
from tests.bench.cluster import embedded
from tests.bench.consuming import consume, delay, filters, share
from tests.bench.figures import Figure, as_markdown, as_table
from tests.bench.gateway.gateway import gateway
from tests.bench.machine import touch_memory
from tests.bench.peers import peer_versions, peers

CLUSTER_SECTIONS = """produce bounds consume filter receive share requests delay producers overload fan-out queues
    waiting topics groups lone-send memory trace scrub gateway spark""".split()
SECTIONS = (*CLUSTER_SECTIONS, "store", "copies")
TOUCHED_BYTES = 3 << 30
LIBRARIES = "ray numpy pyarrow pyspark isal msgspec redis hiredis nats-py".split()


def main() -> None:
    """Run the benchmark sections that the options name, print a table of their measurements, and write the files that
    the options name."""
    options = _options()
    console, figures = Console(width=max(Console().width, 150)), list[Figure]()

    failed = list[str]()

    def take(section: str, found: Iterable[Figure]) -> None:
        try:
            take_all(found)
        # If one section of the benchmark fails, the results of the other sections must still be printed.
        except Exception:
            failed.append(section)
            traceback.print_exc()

    def take_all(found: Iterable[Figure]) -> None:
        for figure in found:
            figures.append(figure)
            line = f"{figure.section}: {figure.name}: {figure.best.value:,.3f} {figure.unit}"
            print(line, file=sys.stderr, flush=True)

    only, rounds, size = options.only, options.rounds, options.scale
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rmqb", dir=options.directory) as home:
        directory = Path(home)
        touch_memory(directory, int(TOUCHED_BYTES * min(size, 1.0)))
        if "store" in only:
            take("store", stores.stores(directory, rounds=rounds, scale=size))
        for sync in (False, True):
            sections = _cluster_sections(only, sync=sync)
            if not sections:
                continue
            with (
                tempfile.TemporaryDirectory(dir=directory) as here,
                embedded(Path(here), sync=sync) as client,
                peers(Path(here), sync=sync, names=options.peers) as beside,
            ):
                for section in sections:
                    take(section, _run(section, client, beside, sync=sync, rounds=rounds, size=size))
        if "copies" in only:
            take("copies", copies.copies(directory, rounds=rounds, scale=size))
    if options.markdown:
        options.markdown.write_text(as_markdown(figures))
    if options.json:
        _write(options.json, figures, time.monotonic() - started)
    console.print(as_table(figures))
    missed = [f"{figure.section}: {figure.name}" for figure in figures if figure.reached() is False]
    console.print(f"{len(missed)} goals are not reached{': ' if missed else ''}{'; '.join(missed)}")
    if failed:
        sys.exit(f"these sections failed, see above: {', '.join(failed)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each figure")
    parser.add_argument("--scale", type=float, default=1.0, help="length of the rounds; 0.1 for a quick look")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="sections to run")
    parser.add_argument("--peers", nargs="*", choices=("redis", "nats", "ray"), default=("redis", "nats", "ray"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table to FILE, for a page")
    parser.add_argument("--directory", type=Path, help="where the stores are made; default: the temporary directory")
    return parser.parse_args()


def _cluster_sections(only: Iterable[str], *, sync: bool) -> list[str]:
    """Return the requested benchmark sections that need a cluster. With SYNC_FLUSH, return only sections whose results
    depend on the disk."""
    return [one for one in CLUSTER_SECTIONS if one in only and (not sync or one in ("produce", "consume", "delay"))]


def _run(section: str, client: object, beside: object, *, sync: bool, rounds: int, size: float) -> Iterable[Figure]:
    with_peers = {"produce": produce.produce, "consume": consume.consume, "delay": delay.delays}
    if section in with_peers:
        return with_peers[section](client, beside, sync=sync, rounds=rounds, scale=size)  # type: ignore[arg-type]
    in_rounds: dict[str, Callable[..., Iterable[Figure]]] = {
        "bounds": produce.bounds,
        "requests": requests.requests,
        "producers": many.producers,
        "fan-out": many.fan_out,
        "queues": many.queues,
        "receive": consume.receive,
        "share": share.share,
        "spark": spark.spark,
        "trace": trace.trace,
        "scrub": scrub.scrub,
        "filter": filters.filters,
        "gateway": gateway,
    }
    if section in in_rounds:
        return in_rounds[section](client, rounds=rounds, scale=size)
    once: dict[str, Callable[..., Iterable[Figure]]] = {
        "overload": many.overload,
        "waiting": many.waiting,
        "topics": many.topics,
        "groups": many.groups,
        "lone-send": copies.lone_send_beside_index,
    }
    return once[section](client, scale=size) if section in once else memory.memory(client)  # type: ignore[arg-type]


def _write(path: Path, figures: list[Figure], seconds: float) -> None:
    installed = {one.name: one.version for one in distributions()}
    report = {
        "raymq": version("raymq"),
        "python": platform.python_version(),
        "machine": {"cores": os.cpu_count(), "kernel": platform.release(), "processor": platform.machine()},
        "peers": peer_versions(),
        # An environment with Spark 4 lacks the clients of the peers.
        "libraries": {name: installed[name] for name in LIBRARIES if name in installed},
        "took_s": round(seconds),
        "figures": [figure.as_dict() for figure in figures],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

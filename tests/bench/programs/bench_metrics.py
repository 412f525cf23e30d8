"""Benchmark of the cost of metrics: producing and consuming with and without metrics, and an idle cluster of many
topics and groups.

    python -m tests.bench.programs.bench_metrics cost [--rounds 3] [--seconds 4]     clusters with and without, in turn
    python -m tests.bench.programs.bench_metrics clients [--rounds 3] [--seconds 4]  one cluster, counting on and off
    python -m tests.bench.programs.bench_metrics idle [--topics 500] [--groups 20]   clusters without and with both

Each command starts its own raymq in a temporary directory. `cost` and `clients` compare medians of one run, with the
CPU time of all processes per message. In `clients` the servers always count messages, and this process counts them in
every other call. So other load on the machine slows the calls with and without counting alike. `idle` measures the CPU
of every process of an idle cluster, in percent of a core. It measures first without metrics and console, then with both
and a scrape every 15 s. `idle` also times a scrape.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import psutil
import ray

import raymq
from raymq.client.cluster.launcher import launch
from raymq.common.config.cluster import ClusterSettings
from raymq.common.config.console import ConsoleOptions
from raymq.telemetry.metrics.client_figures import CLIENT_FIGURES
from tests.bench.machine import cpu_of, processes, server_name, timed
from tests.bench.ways import ways

TOLD_S = 60.0
SETTLE_S = 30.0
SCRAPE_INTERVAL_S = 15.0
"""Seconds between two scrapes of the benchmark. Prometheus scrapes every minute by default, and every 10 s in Ray's
configuration of Prometheus."""
SHOWN_PERCENT = 0.1
GOAL = 0.02
IDLE_GOAL_PERCENT = 3.0


@contextmanager
def cluster(*, metrics: bool) -> Iterator[raymq.Client]:
    """Run a raymq cluster with or without metrics. Yields a client that has received the cluster's metrics setting from
    a broker."""
    with tempfile.TemporaryDirectory(prefix="rqm") as directory:
        config = Path(directory) / "raymq.yaml"
        config.write_text(f"store:\n  flush_disk_type: ASYNC_FLUSH\nmetrics:\n  enable: {str(metrics).lower()}\n")
        with raymq.connect(embedded=True, config=config, data_dir=Path(directory) / "store") as client:
            with client.producer("bench"):
                deadline_s = time.monotonic() + TOLD_S
                while CLIENT_FIGURES.options is None or CLIENT_FIGURES.enabled != metrics:
                    if time.monotonic() > deadline_s:
                        raise TimeoutError("no broker says if there are metrics")
                    time.sleep(0.1)
            yield client


Samples = dict[tuple[str, bool], list[tuple[float, float]]]
"""Samples of producing and consuming calls. A key is a pair: the call's name, and whether metrics are on. A sample is
the number of messages per second and the CPU time per message in us."""


def cost(rounds: int, seconds: float) -> None:
    """Compare clusters with and without metrics: print the ratios of messages per second and of CPU time per
    message."""
    samples: Samples = defaultdict(list)
    for turn in range(rounds):
        for metrics in (True, False) if turn % 2 else (False, True):
            with cluster(metrics=metrics) as client:
                for name, number, call in ways(client):
                    call()
                    until_s = time.monotonic() + seconds
                    while time.monotonic() < until_s:
                        samples[name, metrics].append(sample(number, call))
    show(samples)


def counting(rounds: int, seconds: float) -> None:
    """Measure this client with and without metrics in one cluster. Print the ratios of messages per second and of CPU
    time per message."""
    samples: Samples = defaultdict(list)
    with cluster(metrics=True) as client:
        for name, number, call in ways(client):
            call()
            until_s = time.monotonic() + rounds * seconds
            while time.monotonic() < until_s:
                for metrics in (False, True, True, False):
                    CLIENT_FIGURES.enabled = metrics
                    samples[name, metrics].append(sample(number, call))
            CLIENT_FIGURES.enabled = True
    show(samples)


def sample(number: int, call: Callable[[], None]) -> tuple[float, float]:
    """Time one call that handles `number` messages. Returns messages per second, and CPU time per message in
    us."""
    took_s, cpu_s = timed(call, set())
    return number / took_s, cpu_s / number * 1e6


def show(samples: Samples) -> None:
    """Print the medians of the samples with and without metrics, and their ratios."""
    print(f"{'':20}{'msg/s off':>12}{'msg/s on':>12}{'ratio':>8}{'CPU us off':>12}{'CPU us on':>12}{'ratio':>8}")
    for name in dict.fromkeys(name for name, _ in samples):
        off, on = (statistics.median(speed for speed, _ in samples[name, metrics]) for metrics in (False, True))
        cpu_off, cpu_on = (statistics.median(cpu for _, cpu in samples[name, metrics]) for metrics in (False, True))
        late = "" if on >= off * (1 - GOAL) else "  slower than the goal of 2 %"
        print(
            f"{name:20}{off:12,.0f}{on:12,.0f}{on / off:8.3f}{cpu_off:12.2f}{cpu_on:12.2f}{cpu_on / cpu_off:8.3f}{late}"
        )


def idle(topics: int, groups: int, seconds: float) -> None:
    """Print the CPU use of an idle cluster with `topics` topics and `groups` groups, first without metrics and console,
    then with both."""
    without, with_both = (idle_shares(topics, groups, seconds, watched=watched) for watched in (False, True))
    print(f"{'percent of a core':30}{'off':>8}{'on':>8}{'more':>8}")
    for name in sorted(without.keys() | with_both.keys()):
        off, on = without.get(name, 0.0), with_both.get(name, 0.0)
        if max(off, on) >= SHOWN_PERCENT:
            print(f"{name:30}{off:8.2f}{on:8.2f}{on - off:+8.2f}")
    off, on = sum(without.values()), sum(with_both.values())
    late = "" if on - off <= IDLE_GOAL_PERCENT else f"  more than the goal of {IDLE_GOAL_PERCENT:g} %"
    print(f"{'all':30}{off:8.2f}{on:8.2f}{on - off:+8.2f}{late}")


def idle_shares(topics: int, groups: int, seconds: float, *, watched: bool) -> dict[str, float]:
    """Return the CPU use of an idle cluster's processes, in percent of a core, summed by process name.

    `watched`: run the cluster with metrics and a console.
    """
    with cluster(metrics=watched) as client:
        if watched:
            settings = ClusterSettings(console=ConsoleOptions(port=0))
            launch("console", ray.get_runtime_context().gcs_address, settings)
        names = [f"idle-{number}" for number in range(topics)]
        for name in names:
            client.admin.create_topic(name, queues=1)
        queues = [queue for name in names for queue in client.write_queues(name)]
        for number in range(groups):
            with client.pull_consumer(f"idle-g{number}", auto_commit=False) as consumer:
                consumer.assign(queues)
                consumer.commit(dict.fromkeys(queues, 0))
        # Wait until the servers have reported their metrics twice, so that the metrics agent has all time series.
        time.sleep(SETTLE_S)
        before = {process.pid: (server_name(process), cpu_of(process.pid)) for process in processes()}
        start_s = time.monotonic()
        while time.monotonic() < start_s + seconds:
            time.sleep(SCRAPE_INTERVAL_S)
            if watched:
                scrape()
        span_s = time.monotonic() - start_s
        shares: dict[str, float] = defaultdict(float)
        for pid, (name, used_s) in before.items():
            now_s = cpu_of(pid) if psutil.pid_exists(pid) else None
            if used_s is not None and now_s is not None and pid != os.getpid():
                shares[name] += 100 * (now_s - used_s) / span_s
        if watched:
            print(scrape())
        return shares


def scrape() -> str:
    """Read the metrics of every node, as Prometheus does. Returns the duration of the read as text."""
    told = []
    for node in ray.nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        start_s = time.perf_counter()
        with urllib.request.urlopen(url, timeout=60) as answer:
            text = answer.read()
        took_s = time.perf_counter() - start_s
        told.append(f"/metrics: {took_s:.3f} s, {len(text) >> 10} KiB, {text.count(b'ray_raymq_')} lines of raymq's")
    return "; ".join(told)


def main() -> None:
    """Run the measurement that the arguments select."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    costs = commands.add_parser("cost", help="producing and consuming, with metrics and without")
    costs.add_argument("--rounds", type=int, default=3, help="clusters of each kind")
    costs.add_argument("--seconds", type=float, default=4.0, help="time for each way in each cluster")
    clients = commands.add_parser("clients", help="the same in one cluster, with this process counting and not")
    clients.add_argument("--rounds", type=int, default=3)
    clients.add_argument("--seconds", type=float, default=4.0, help="time for each way in each round")
    quiet = commands.add_parser("idle", help="an idle cluster of many topics and groups")
    quiet.add_argument("--topics", type=int, default=500)
    quiet.add_argument("--groups", type=int, default=20)
    quiet.add_argument("--seconds", type=float, default=60.0, help="time for which it is measured")
    options = parser.parse_args()
    if options.command == "cost":
        cost(options.rounds, options.seconds)
    elif options.command == "clients":
        counting(options.rounds, options.seconds)
    else:
        idle(options.topics, options.groups, options.seconds)


if __name__ == "__main__":
    main()

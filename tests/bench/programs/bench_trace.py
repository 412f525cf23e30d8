"""The cost of a trace: producing and consuming by a client that traces and by one that does not, in turn.

    python -m tests.bench.programs.bench_trace [--rounds 5] [--seconds 3]

It starts its own raymq in a temporary directory. A round is a window of calls by each client; before the one without a
trace begins, the records of the other have been sent. The medians of one run are compared; CPU is that of all
processes, per message, so the stores' work for the records is in it. `traced` is the share of the messages whose
records were sent: the others were dropped, because a trace uses a bounded share of a processor.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import raymq
from raymq.trace.dispatcher import TraceStatistics
from tests.bench.consuming.consume import push_to_listener
from tests.bench.programs.bench_metrics import Samples, sample, ways

GOAL_RATIO = 0.9
PUSHED = 60_000
SETTLED_S = 1.5


def settle(client: raymq.Client) -> None:
    """Wait until a client has sent all its records."""
    before = None
    while (now := client.trace_statistics()) != before:
        before = now
        time.sleep(SETTLED_S)


def run(rounds: int, seconds: float) -> None:
    """Print the ratio of speeds and of CPU per message, with a trace and without."""
    samples: Samples = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="rqt") as directory:
        config = Path(directory) / "raymq.yaml"
        config.write_text("store:\n  flush_disk_type: ASYNC_FLUSH\n")
        with (
            raymq.connect(embedded=True, config=config, data_dir=Path(directory) / "store") as plain,
            raymq.connect(trace=True) as traced,
        ):
            for (name, number, without), (_, _, with_trace) in zip(ways(plain), ways(traced), strict=True):
                calls = {False: without, True: with_trace}
                without()
                with_trace()
                before = traced.trace_statistics()
                for turn in range(rounds):
                    for on in (False, True) if turn % 2 else (True, False):
                        settle(traced)
                        until_s = time.monotonic() + seconds
                        while time.monotonic() < until_s:
                            samples[name, on].append(sample(number, calls[on]))
                settle(traced)
                show(name, samples, before, traced.trace_statistics())
            push(plain, traced, rounds)


def push(plain: raymq.Client, traced: raymq.Client, rounds: int) -> None:
    """The same for a listener, which traces in its own process."""
    topic = "trace-push"
    plain.admin.create_topic(topic, queues=4)
    with plain.producer("bench") as producer:
        for _ in range(PUSHED // 5000):
            producer.send_batch([raymq.Message(topic, b"x" * 1024) for _ in range(5000)])
    samples: Samples = defaultdict(list)
    for turn in range(rounds):
        for on in (False, True) if turn % 2 else (True, False):
            found = push_to_listener(traced if on else plain, topic, PUSHED, set())
            samples["push listener", on].append((found.value, found.cpu_us or 0.0))
    show("push listener", samples)


def show(
    name: str,
    samples: Samples,
    before: TraceStatistics | None = None,
    after: TraceStatistics | None = None,
) -> None:
    """Print a way's medians and their ratios."""
    off, on = (statistics.median(speed for speed, _ in samples[name, which]) for which in (False, True))
    cpu_off, cpu_on = (statistics.median(cpu for _, cpu in samples[name, which]) for which in (False, True))
    late = "" if on >= off * GOAL_RATIO else "  slower than the goal of 10 %"
    share = ""
    if before is not None and after is not None:
        sent, dropped = after.sent - before.sent, after.dropped - before.dropped
        share = f"{sent / max(sent + dropped, 1):9.0%} traced"
    print(
        f"{name:20}{off:12,.0f}{on:12,.0f}{on / off:8.3f}{cpu_off:12.2f}{cpu_on:12.2f}{cpu_on / cpu_off:8.3f}{share}"
        f"{late}",
        flush=True,
    )


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="time of a window of calls")
    options = parser.parse_args()
    print(f"{'':20}{'msg/s off':>12}{'msg/s on':>12}{'ratio':>8}{'CPU us off':>12}{'CPU us on':>12}{'ratio':>8}")
    run(options.rounds, options.seconds)


if __name__ == "__main__":
    main()

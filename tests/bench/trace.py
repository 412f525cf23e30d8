"""Benchmark of message tracing: a client that traces its producing and consuming, compared with a client that does not
trace.

Both clients use one cluster. In a round, each client repeats a call for a fixed time. Before the client without tracing
begins, the tracing client has sent all its trace records. CPU times are per message and include all processes, and so
also the stores' work for the trace records. The traced share is the percentage of the messages whose trace records are
sent. The trace records of the other messages are dropped, because tracing may use only a limited share of a processor.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import raymq
from raymq.telemetry.trace.dispatcher import TraceStatistics
from tests.bench.cluster import new_topic
from tests.bench.consuming.consume import push_to_listener
from tests.bench.figures import Figure, Goal, Sample
from tests.bench.machine import timed
from tests.bench.produce import send_tables
from tests.bench.ways import BODY, ways

WINDOW_S = 2.0
PUSHED = 60_000
SETTLED_S = 1.5
"""A client counts as having sent all its trace records if its trace statistics have not changed for this number of
seconds."""
GOALS = [Goal(">=", 0.9, "untraced")]


def trace(client: raymq.Client, *, rounds: int, scale: float) -> Iterator[Figure]:
    """Yield the speed of each kind of call with tracing, compared with the same call without tracing, and the share of
    messages that were traced. `client`: the client that does not trace."""
    window_s = max(0.1, WINDOW_S * scale)
    with raymq.connect(trace=True) as traced:
        for (name, number, plain), (_, _, with_trace) in zip(ways(client), ways(traced), strict=True):
            plain()
            with_trace()
            before = settled_statistics(traced)
            figure = Figure("trace", name, "msg/s", True, GOALS)
            for _ in range(rounds):
                settled_statistics(traced)
                figure.add_round(
                    lambda call=with_trace, number=number: _window(call, number, window_s),
                    {"untraced": lambda call=plain, number=number: _untraced(traced, call, number, window_s)},
                )
            yield figure
            yield _share(name, before, settled_statistics(traced))
        yield _push(client, traced, rounds, max(5000, int(PUSHED * scale) // 5000 * 5000))


def settled_statistics(client: raymq.Client) -> TraceStatistics:
    """Wait until a client has sent all its trace records. Returns the client's trace statistics."""
    before = None
    while (now := client.trace_statistics()) != before:
        before = now
        time.sleep(SETTLED_S)
    return now


def _untraced(traced: raymq.Client, call: Callable[[], None], number: int, window_s: float) -> Sample:
    settled_statistics(traced)
    return _window(call, number, window_s)


def _window(call: Callable[[], None], number: int, window_s: float) -> Sample:
    """Repeat a call that handles `number` messages, for `window_s` seconds. Returns the median of the messages per
    second and of the CPU time per message."""
    until_s, samples = time.monotonic() + window_s, list[tuple[float, float]]()
    while not samples or time.monotonic() < until_s:
        took_s, cpu_s = timed(call, set())
        samples.append((number / took_s, cpu_s / number * 1e6))
    speeds, cpus = zip(*samples, strict=True)
    return Sample(statistics.median(speeds), statistics.median(cpus))


def _share(name: str, before: TraceStatistics, after: TraceStatistics) -> Figure:
    sent, dropped = after.sent - before.sent, after.dropped - before.dropped
    figure = Figure("trace", f"{name}, traced", "%", True)
    figure.add_round(lambda: 100 * sent / max(sent + dropped, 1), {})
    return figure


def _push(client: raymq.Client, traced: raymq.Client, rounds: int, total: int) -> Figure:
    """Measure a push consumer with and without tracing. The listener's process sends the trace records."""
    topic = new_topic(client, "trace-push")
    with client.producer("bench") as producer:
        send_tables(producer, topic, BODY, total)
    figure = Figure("trace", "push, an empty listener", "msg/s", True, GOALS)
    for _ in range(rounds):
        figure.add_round(
            lambda: push_to_listener(traced, topic, total, set()),
            {"untraced": lambda: push_to_listener(client, topic, total, set())},
        )
    return figure

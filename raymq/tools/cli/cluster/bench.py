"""`raymq bench`: measures sends, reads and delays on the running raymq, beside the speed of its disk and machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click
from rich.table import Table as RichTable

from raymq.common.errors import InvalidArgumentError
from raymq.tools.bench.plan import (
    BENCH_BATCH,
    BENCH_MESSAGES,
    BENCH_SECONDS,
    BENCH_SIZE,
    BENCH_THREADS,
    BenchOptions,
    plan_run,
)
from raymq.tools.cli.entry import cli
from raymq.tools.cli.known_names import completes
from raymq.tools.cli.options import number_option
from raymq.tools.cli.terminal.command import CommandResult, command
from raymq.tools.cli.terminal.number_type import RateType
from raymq.tools.cli.terminal.output import say_error

if TYPE_CHECKING:
    from raymq.client.client import Client
    from raymq.client.cluster.launcher import ProgressCallback


@command(cli)
@click.option(
    "--topic",
    "topic_name",
    metavar="TOPIC",
    shell_complete=completes("topics"),
    help="Send to this existing topic, where the messages stay. Default: a temporary topic, which is deleted.",
)
@number_option("--messages", BENCH_MESSAGES, "Number of messages of each phase. Default: as many as the time allows.")
@number_option(
    "--seconds", BENCH_SECONDS, "Maximum seconds of all phases together. Default: 14, or 120 with --messages."
)
@number_option("--size", BENCH_SIZE, "Size of each message body in bytes.", 1024)
@number_option("--producers", BENCH_THREADS, "Number of producers, each in a thread of the command.", 1)
@number_option("--consumers", BENCH_THREADS, "Number of consumers, each in a thread of the command.", 1)
@number_option("--batch", BENCH_BATCH, "Messages in a batch. Default: 500, or fewer if they have more than 4 MiB.")
@click.option(
    "--rate",
    type=RateType(),
    help="Messages per second of all producers, for single sends and delays. Default: no pause between single sends; "
    "for delays half of the rate that these reached, at most 1000.",
)
def bench(
    client: Client,
    progress: ProgressCallback,
    topic_name: str | None,
    messages: int | None,
    seconds: float | None,
    size: int,
    producers: int,
    consumers: int,
    batch: int | None,
    rate: float | None,
) -> CommandResult:
    """Measure sends, reads and delays in about 20 seconds, beside the speed of the disk and the machine.

    Sends messages one by one and in batches, reads them with pull and simple consumers, and measures the delay from
    send to poll. A time at a fixed rate counts from the scheduled time of the send. The temporary topic is deleted at
    the end, also on ctrl-C; its bytes stay in the log until the store deletes old files. Exit code 1 if a phase fails.

    Example: raymq bench, or raymq bench --size 100 --producers 4 --rate 2000/s --json
    """
    options = BenchOptions(topic_name, messages, seconds, size, producers, consumers, batch, rate)
    try:
        plan = plan_run(options)
    except InvalidArgumentError as error:
        raise click.UsageError(str(error)) from None
    from raymq.tools.bench.report import BENCH_COLUMNS, BenchReport, bench_lines, bench_rows, bench_value
    from raymq.tools.bench.run import BenchRun
    from raymq.tools.bench.surroundings import (
        broker_setups,
        check_free_space,
        local_directories,
        machine_figures,
        measure_disk,
    )

    load_before = os.getloadavg()[0]
    progress("asking the brokers")
    brokers, directories = broker_setups(client), local_directories(client)
    check_free_space(directories, plan.bytes_max)
    disks = []
    for directory in directories:
        progress(f"measuring the disk of {directory}")
        disks.append(measure_disk(directory))
    run = BenchRun(client, plan, progress)
    try:
        run.run()
    except BaseException:
        for text in (*run.errors, *run.objects.rest()):
            say_error(text)
        raise
    report = BenchReport(
        plan,
        run.topic,
        run.queues,
        run.results,
        brokers,
        disks,
        machine_figures(load_before),
        run.errors,
        run.objects.rest(),
    )
    view = RichTable()
    for name in BENCH_COLUMNS:
        view.add_column(name, justify="left" if name == BENCH_COLUMNS[0] else "right")
    for row in bench_rows(run.results):
        view.add_row(*row)
    errors = [*report.errors, *report.left]
    return CommandResult(bench_value(report), view, *bench_lines(report), errors=errors, failed=bool(errors))

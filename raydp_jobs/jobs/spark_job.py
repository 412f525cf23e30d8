"""Common parts of the jobs that need Spark: connection, session, and one-line errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from raydp_jobs import SPARK_COUNT, START_TIMEOUT_VARIABLE
from raydp_jobs.task_errors import raymq_error
from raymq.common.errors import InvalidArgumentError, RaymqError
from raymq.common.extras import require_extra
from raymq.common.names import check_topic
from raymq.tools.cli.options import DURATION
from raymq.tools.cli.terminal.number_type import NumberType
from raymq.tools.cli.terminal.output import client_of
from raymq.tools.cli.terminal.progress import steps

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from raymq.client.client import Client

PARTITIONS_PER_CORE: Final = 4
"""Number of Spark partitions per core for a job's aggregated results. Spark's default of 200 partitions is too many for
the few rows of such results."""
_SHUFFLE: Final = "spark.sql.shuffle.partitions"
_RAISED: Final = re.compile(r"^(?:Caused by: )?(?:[\w.]+\.)?(\w+(?:Error|Exception)): (.+)$", re.MULTILINE)
"""Matches a line of a traceback that names an exception."""


@dataclass(frozen=True, slots=True)
class SessionSize:
    """The CPUs and the memory of a job's Spark session. `executor_memory`: the heap of each executor, such as "1g".
    `start_timeout_s`: as in `spark_session`."""

    executors: int = 1
    executor_cores: int = 1
    executor_memory: str = "1g"
    start_timeout_s: float | None = None


SPARK_PARAMETERS: Final = ("executors", "executor_cores", "executor_memory", "start_timeout")
"""Names of the parameters that `spark_options` adds to a command."""


def spark_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with the Spark options that all Spark jobs share. The command gets their values as one
    argument, `size`."""

    @click.option(
        "--executors", type=NumberType(SPARK_COUNT), default=1, show_default=True, help="Number of Spark executors."
    )
    @click.option(
        "--executor-cores",
        type=NumberType(SPARK_COUNT),
        default=1,
        show_default=True,
        help="CPU cores of each executor.",
    )
    @click.option("--executor-memory", default="1g", show_default=True, help="Memory of each executor, such as 2g.")
    @click.option(
        "--start-timeout",
        type=DURATION,
        help=f"How long Spark may take to start, such as 5m. Default: {START_TIMEOUT_VARIABLE} in seconds, or 2m.",
    )
    @wraps(command)
    def with_size(
        *args: Any,
        executors: int,
        executor_cores: int,
        executor_memory: str,
        start_timeout: float | None,
        **options: Any,
    ) -> Any:
        size = SessionSize(executors, executor_cores, executor_memory, start_timeout)
        return command(*args, size=size, **options)

    return with_size


def refuse_beside(option: str, *unused: str) -> None:
    """Raise InvalidArgumentError if the command line has `option` together with a parameter of `unused`. The parameters
    `unused` have no effect beside `option`. Values from environment variables are not refused."""
    context = click.get_current_context()
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in unused and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise InvalidArgumentError(f"{', '.join(given)} has no effect beside {option}: leave out one of the two")


def check_topics(client: Client, topics: Iterable[str]) -> None:
    """Raise IllegalNameError or TopicNotExistError unless a job can read these topics."""
    from raymq.client.scan.queue_bounds import ClusterQueues

    source = ClusterQueues(client.routes, client.storages, client.names)
    for topic in topics:
        source.queues(check_topic(topic))


@contextmanager
def spark_job(
    name: str,
    address: str | None,
    size: SessionSize,
    *,
    quiet: bool,
    configs: Mapping[str, str] | None = None,
    check: Callable[[Client], object] = lambda client: None,
) -> Iterator[tuple[SparkSession, Client]]:
    """Open a Spark session with the settings `configs`, and a client, for the duration of a job. `quiet`: show no
    progress. `check`: a function that checks the job's topics and directories with the client, before Spark is loaded
    and started.

    Raises MissingExtraError if Spark is not installed, and the errors of `check`, `raymq.connect` and `spark_session`.
    Converts errors of Spark tasks as `clear_errors` does.
    """
    from raydp_jobs.executor_places import memory_mib

    require_extra("spark", f"raymq job {name}")
    memory_mib(size.executor_memory)
    with ExitStack() as opened:
        client = opened.enter_context(client_of(address))
        check(client)
        with steps(quiet=quiet) as progress:
            progress("loading Spark")
            from raydp_jobs import spark_session
        session = spark_session(
            name,
            executors=size.executors,
            executor_cores=size.executor_cores,
            executor_memory=size.executor_memory,
            start_timeout_s=size.start_timeout_s,
            configs={_SHUFFLE: str(PARTITIONS_PER_CORE * size.executors * size.executor_cores), **(configs or {})},
        )
        with steps(quiet=quiet) as progress:
            progress("starting Spark")
            spark = opened.enter_context(session)
        opened.enter_context(clear_errors())
        yield spark, client


@contextmanager
def clear_errors() -> Iterator[None]:
    """Convert a Spark exception that the `with` block raises into a RaymqError with a one-line text.

    If a Spark task raised an error of raymq.common.errors, that error is raised again. Otherwise the new error contains
    the first error that the Spark exception's text names.
    """
    from pyspark.errors import PySparkException

    from raydp_jobs.spark_internals import JVM_ERRORS

    try:
        yield
    except (PySparkException, *JVM_ERRORS) as error:
        raise job_error(str(error)) from error


def job_error(text: str) -> RaymqError:
    """Return the error that the text of a Spark exception contains. Most of the text is Java and Python
    tracebacks."""
    if (ours := raymq_error(text)) is not None:
        return ours
    named = _RAISED.findall(text)
    others = [f"{name}: {reason}" for name, reason in named if not name.startswith(("Spark", "Python", "Py4J"))]
    first_line = text.strip().partition("\n")[0]
    return RaymqError(f"Spark could not finish: {[*others, first_line][0]}")

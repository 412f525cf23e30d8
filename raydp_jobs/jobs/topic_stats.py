"""A job that computes statistics of topics over time: numbers of messages and bytes, rates, tags and keys.

    read_topic → lean → counted            one row per topic, bucket of time and tag; read once, kept in Spark
                          ├─ totals        one row per topic
                          ├─ tag_totals    one row per topic and tag
                          └─ buckets       one row per topic, bucket and tag; rare tags together

Times are store times. Keys are counted with sketches (HyperLogLog): exactly for few keys, within 2 % for many.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from raydp_jobs.jobs.pictures import check_picture, save_picture
from raydp_jobs.jobs.spark_job import SessionSize, check_topics, spark_job, spark_options
from raydp_jobs.jobs.times import ALWAYS, Period, every_option, period_options
from raydp_jobs.jobs.topic_figures import Bucket, TopicFigures, draw, figures_json, show
from raydp_jobs.jobs.topic_report import check_report, report, save_report
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import InvalidArgumentError
from raymq.common.numbers import NumberRange
from raymq.tools.cli.entry import run_command
from raymq.tools.cli.known_names import completes
from raymq.tools.cli.terminal.number_type import NumberType
from raymq.tools.cli.terminal.output import (
    Command,
    address_option,
    json_option,
    namespace_option,
    print_value,
    quiet_option,
)
from raymq.tools.cli.terminal.progress import counting

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from raymq.client.client import Client

BUCKETS_MAX: Final = 20_000
"""Maximum number of time buckets over all topics: about two weeks in buckets of one minute. The limit protects the
driver's memory, which holds all buckets."""
TAGS_MAX: Final = 100


def run(
    spark: SparkSession,
    client: Client,
    topics: Sequence[str],
    *,
    every_s: int = 60,
    top: int = 8,
    tags: str = "*",
    period: Period = ALWAYS,
    quiet: bool = True,
) -> list[TopicFigures]:
    """Compute the statistics of each topic, in the given order, in time buckets of `every_s` seconds. The `top` most
    common tags are counted separately.

    Raises InvalidArgumentError for more than BUCKETS_MAX buckets, and the errors of `read_topic`.
    """
    from raydp_jobs.source.read_progress import ReadProgress
    from raydp_jobs.source.reader import open_topic

    with (
        counting(f"reading {', '.join(topics)}", talks=quiet) as counter,
        ReadProgress(counter.expect, counter.advance) as progress,
    ):
        messages = open_topic(
            spark,
            topics,
            columns=["topic", "tags", "keys", "body_size", "store_timestamp"],
            tags=tags,
            client=client,
            progress=progress,
            **period.scan_options(),
        )
        counts = counted(lean(period.of(messages)), every_s).persist()
        try:
            found = counts.select("topic", "start").distinct().count()
            if found > BUCKETS_MAX:
                raise InvalidArgumentError(
                    f"the messages span {found} intervals of {every_s} s, but at most {BUCKETS_MAX} can be shown: "
                    "choose longer intervals with --every, or a time range with --from and --to"
                )
            of_topics = totals(counts).collect()
            of_tags = tag_totals(counts).collect()
            common = common_tags([row.asDict() for row in of_tags], top)
            of_buckets = buckets(counts, common).collect()
        finally:
            counts.unpersist()
    return figures(topics, of_topics, common, of_buckets)


# Steps of the Spark job; each converts a DataFrame to another DataFrame


def lean(messages: DataFrame) -> DataFrame:
    """Return only the columns that the statistics need: topic, tags, keys, store time and body size."""
    from pyspark.sql import functions as sf

    return messages.select("topic", "tags", "keys", "store_timestamp", sf.col("body_size").alias("size"))


def counted(messages: DataFrame, every_s: int) -> DataFrame:
    """Return one row per topic, time bucket (`start`) and tag. The row has the number of messages and of bytes, the
    largest message, the first and last store time, and a sketch of the keys.

    In an intermediate step a message with several keys becomes several rows; only its first row counts as a message.
    """
    from pyspark.sql import functions as sf

    start = sf.window("store_timestamp", f"{every_s} seconds").getField("start").alias("start")
    rows = messages.select(
        "topic", start, "tags", "size", "store_timestamp", sf.posexplode_outer("keys").alias("position", "key")
    )
    is_first = sf.coalesce("position", sf.lit(0)) == 0
    return rows.groupBy("topic", "start", "tags").agg(
        sf.sum(is_first.cast("long")).alias("messages"),
        sf.sum(sf.when(is_first, sf.col("size").cast("long")).otherwise(0)).alias("bytes"),
        sf.max("size").alias("largest"),
        sf.min("store_timestamp").alias("first"),
        sf.max("store_timestamp").alias("last"),
        sf.hll_sketch_agg("key").alias("keys"),
    )


def totals(counts: DataFrame) -> DataFrame:
    """Add up the counts per time bucket and tag (the rows of `counted`). Returns one row per topic."""
    from pyspark.sql import functions as sf

    return counts.groupBy("topic").agg(
        sf.sum("messages").alias("messages"),
        sf.sum("bytes").alias("bytes"),
        sf.max("largest").alias("largest"),
        epoch(sf.min("first")).alias("first"),
        epoch(sf.max("last")).alias("last"),
        sf.hll_sketch_estimate(sf.hll_union_agg("keys")).alias("keys"),
    )


def tag_totals(counts: DataFrame) -> DataFrame:
    """Return the TAGS_MAX most common tags of each topic with their numbers of messages, most common first."""
    from pyspark.sql import Window, functions as sf

    order = Window.partitionBy("topic").orderBy(sf.desc("messages"), "tags")
    sums = counts.groupBy("topic", "tags").agg(sf.sum("messages").alias("messages"))
    ranked = sums.withColumn("rank", sf.row_number().over(order))
    return ranked.where(sf.col("rank") <= TAGS_MAX).orderBy("topic", "rank").drop("rank")


def buckets(counts: DataFrame, common: dict[str, dict[str | None, int]]) -> DataFrame:
    """Return one row per topic and time bucket, with the numbers of messages, bytes and keys. The row also lists the
    number of messages with each tag in `common`, in the order of `common`."""
    from pyspark.sql import functions as sf

    named = {topic: list(tags) for topic, tags in common.items()}
    places = []
    for index in range(max(map(len, named.values()), default=0)):
        here = [(topic, tags[index]) for topic, tags in named.items() if index < len(tags)]
        has_tag = [(sf.col("topic") == topic) & sf.col("tags").eqNullSafe(sf.lit(tag)) for topic, tag in here]
        places.append(sf.sum(sf.when(reduce(operator.or_, has_tag), sf.col("messages")).otherwise(0)))
    return (
        counts.groupBy("topic", "start")
        .agg(
            sf.sum("messages").alias("messages"),
            sf.sum("bytes").alias("bytes"),
            sf.hll_sketch_estimate(sf.hll_union_agg("keys")).alias("keys"),
            sf.array(*places).alias("tags"),
        )
        .withColumn("start", epoch(sf.col("start")))
        .orderBy("topic", "start")
    )


def epoch(time: Column) -> Column:
    """Convert a time column to seconds since 1970. Spark's `collect` would silently convert a time column to this
    machine's time zone."""
    from pyspark.sql import functions as sf

    return sf.unix_micros(time) / 1_000_000


# Converting Spark's rows to statistics


def common_tags(rows: Iterable[dict[str, Any]], top: int) -> dict[str, dict[str | None, int]]:
    """Return the `top` most common tags of each topic with their numbers of messages. `rows`: the rows of `tag_totals`,
    sorted by number of messages."""
    result: dict[str, dict[str | None, int]] = {}
    for row in rows:
        of_topic = result.setdefault(row["topic"], {})
        if len(of_topic) < top:
            of_topic[row["tags"]] = row["messages"]
    return result


def figures(
    topics: Sequence[str], of_topics: Iterable[Any], common: dict[str, dict[str | None, int]], of_buckets: Iterable[Any]
) -> list[TopicFigures]:
    """Combine the rows that Spark computed (totals, tags and time buckets of topics) to the statistics of each
    topic."""
    totals_of = {row["topic"]: row for row in of_topics}
    buckets_of: dict[str, list[Bucket]] = {}
    for row in of_buckets:
        # All of Spark's lists of tag counts are as long as the topic with the most tags needs. So this list may be
        # longer than the list of this topic's tags; `zip` ignores the rest.
        counts = dict(zip(common[row["topic"]], row["tags"], strict=False))
        bucket = Bucket(_time(row["start"]), row["messages"], row["bytes"], row["keys"], counts)
        buckets_of.setdefault(row["topic"], []).append(bucket)
    result = []
    for topic in topics:
        row = totals_of.get(topic)
        if row is None:
            result.append(TopicFigures(topic, 0, 0, 0, None, None, 0, {}, 0, []))
            continue
        tags = common[topic]
        times = _time(row["first"]), _time(row["last"])
        amounts = row["messages"], row["bytes"], row["largest"]
        rest = row["messages"] - sum(tags.values())
        result.append(TopicFigures(topic, *amounts, *times, row["keys"], tags, rest, buckets_of[topic]))
    return result


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


@click.command("topic-stats", cls=Command)
@click.argument("topics", metavar="TOPIC...", shell_complete=completes("topics"), nargs=-1, required=True)
@every_option("1m")
@click.option(
    "--top",
    type=NumberType(NumberRange(0, TAGS_MAX)),
    default=8,
    show_default=True,
    help="Number of tags to show by name.",
)
@click.option(
    "--tags", default="*", show_default=True, help='Only messages with these tags, for example "paid || refunded".'
)
@period_options
@click.option(
    "--picture", type=click.Path(path_type=Path, dir_okay=False), help="Draw rates and keys in this PNG file."
)
@click.option(
    "--report",
    "report_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write tables and charts to this HTML file, which needs no other file.",
)
@spark_options
@namespace_option
@address_option
@json_option
@quiet_option
def command(
    topics: tuple[str, ...],
    every_s: int,
    top: int,
    tags: str,
    period: Period,
    picture: Path | None,
    report_file: Path | None,
    size: SessionSize,
    address: str | None,
    as_json: bool,
) -> None:
    """Show how many messages and bytes topics have, at which rates, and their tags and keys over time.

    Example: raymq job topic-stats orders --every 1h --from -2d --report orders.html
    """
    check_picture(picture)
    check_report(report_file)
    names = list(dict.fromkeys(topics))
    Subscription.parse("any", tags)

    def check(client: Client) -> None:
        check_topics(client, names)

    with spark_job("topic-stats", address, size, quiet=as_json, check=check) as (spark, client):
        found = run(spark, client, names, every_s=every_s, top=top, tags=tags, period=period, quiet=as_json)
    if picture is not None:
        save_picture(picture, lambda figure: draw(figure, found, every_s))
    if report_file is not None:
        save_report(report_file, report(found, every_s, made=datetime.now(UTC), period=period, tags=tags))
    files = {name: str(path) for name, path in (("picture", picture), ("report", report_file)) if path is not None}
    print_value(as_json, {**figures_json(found, every_s), **files}, lambda: show(found, every_s))


def main() -> None:
    """Run the job as a program: ``python -m raydp_jobs.jobs.topic_stats orders``."""
    run_command(command)


if __name__ == "__main__":
    main()

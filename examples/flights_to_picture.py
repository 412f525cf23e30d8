# %% [markdown]
# # From flights to a picture
#
# A topic holds a month of flights. Spark reads the topic as a fixed table: the DataFrame's offsets do not change after
# its creation. The question is at which hour of the day flights are late.

# %%
"""Compute the mean delay of a month of flights per hour and airport, and draw `delays.png`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import pyarrow as pa
from matplotlib.figure import Figure
from pyspark.sql import DataFrame, SparkSession, functions as f

import raymq
from raydp_jobs import read_topic, spark_session
from raydp_jobs.demo import load_flights

if TYPE_CHECKING:
    import pandas as pd

mpl.use("Agg")

TOPIC = "example-flights"
MONTH = 1
FIELDS = ["origin", "carrier", "hour", "dep_delay", "distance"]

# %% [markdown]
# ## The topic
# `send_table` takes an Arrow table: a row is a message. The tag is the airport, so that readers can choose by it.


# %%
def month() -> pd.DataFrame:
    """Return the flights of January 2013 from New York."""
    flights = load_flights()
    return flights[flights.month == MONTH]


def send(mq: raymq.Client, flights: pd.DataFrame) -> int:
    """Send each flight as JSON. Returns the number of sent flights."""
    bodies = flights[FIELDS].to_json(orient="records", lines=True).splitlines()
    table = pa.table({"body": pa.array(bodies), "tags": pa.array(flights.origin.astype(str).tolist())})
    with mq.producer("airports") as producer:
        producer.send_table(TOPIC, table)
    return len(flights)


# %% [markdown]
# ## The question
# The read skips messages with other tags without fetching them.


# %%
def delays(spark: SparkSession, mq: raymq.Client) -> DataFrame:
    """Return the mean departure delay in minutes and the number of departed flights, per hour and airport."""
    messages = read_topic(spark, TOPIC, tags="JFK || LGA", columns=["tags", "body"], client=mq)
    flight = f.from_json(f.col("body").cast("string"), "hour int, dep_delay double")
    return (
        messages.select(f.col("tags").alias("origin"), flight.alias("flight"))
        .where("flight.dep_delay is not null")
        .groupBy("origin", "flight.hour")
        .agg(f.avg("flight.dep_delay").alias("delay"), f.count("*").alias("flights"))
        .orderBy("origin", "hour")
    )


# %%
def main(directory: Path) -> dict[str, float]:
    """Send a month of flights, compute the delays and draw `delays.png` into the directory. Returns the number of sent
    flights, the number of flights that departed, and the sum of their delays in minutes."""
    with raymq.connect() as mq:
        mq.admin.create_topic(TOPIC, queues=4)
        sent = send(mq, month())
        with spark_session("flights", executor_memory="512m") as spark:
            rows = delays(spark, mq).collect()
    draw(rows, directory / "delays.png")
    worst = max(rows, key=lambda row: row.delay)
    print(f"{sent:,} flights; the latest leave {worst.origin} at {worst.hour}: {worst.delay:.0f} minutes on average")
    return {
        "sent": float(sent),
        "left": float(sum(row.flights for row in rows)),
        "minutes": sum(row.delay * row.flights for row in rows),
    }


# %% [markdown]
# ## The picture


# %%
def draw(rows: list[DataFrame], file: Path) -> None:
    """Draw the delay over the hours of the day, one line per airport."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for origin in sorted({row.origin for row in rows}):
        line = [(row.hour, row.delay) for row in rows if row.origin == origin]
        axes.plot(*zip(*line, strict=True), marker="o", label=origin)
    axes.set_xticks(range(5, 24, 2))
    axes.set_xlabel("hour of departure")
    axes.set_ylabel("mean delay in minutes")
    axes.set_title("Flights from New York in January 2013")
    axes.legend()
    figure.savefig(file, dpi=100)


# %%
if __name__ == "__main__":
    place = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    with raymq.connect(embedded=True, data_dir=place / "store"):
        main(place)

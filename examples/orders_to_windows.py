# %% [markdown]
# # From orders to windows
#
# Shops send their orders to a topic one after another. Spark reads the topic as a stream and sums the sales per minute
# and shop by the time of each order. Each batch of orders updates the result within a moment.

# %%
"""Aggregate a stream of orders into sales per minute and shop, and draw `sales.png`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from pyspark.sql import DataFrame, SparkSession, functions as f

import raymq
from raydp_jobs import spark_session, stream_topic

mpl.use("Agg")

TOPIC = "example-orders"
SHOPS = ("bakery", "bookshop", "florist")
ORDERS = 3000
SECONDS_BETWEEN = 0.2
OPENED = datetime(2026, 5, 4, 9, tzinfo=UTC)
PATIENCE_S = 240.0

# %% [markdown]
# ## The orders
# The program sends ten minutes of orders, a fifth of a second apart. A sharding key keeps the orders of one shop in one
# queue, in order.


# %%
def orders() -> Iterator[tuple[str, dict[str, object]]]:
    """Yield each order, together with the name of its shop."""
    for number in range(ORDERS):
        at = OPENED + timedelta(seconds=number * SECONDS_BETWEEN)
        shop = SHOPS[number * number % 7 % 3]
        yield shop, {"shop": shop, "at": at.isoformat(), "euros": 2.5 + number % 8 + number // 500}


def send(mq: raymq.Client) -> None:
    """Send each order as a small message of its own, as a shop's till does."""
    with mq.producer("tills") as producer:
        for shop, order in orders():
            producer.send_async(raymq.Message(TOPIC, json.dumps(order).encode(), tags=shop), sharding_key=shop)
        producer.flush()


# %% [markdown]
# ## The windows
# A streaming DataFrame has the columns of the topic. The body is JSON. The time in the body selects the window, and the
# watermark limits how long Spark waits for late orders.


# %%
def sales(spark: SparkSession, mq: raymq.Client) -> DataFrame:
    """Return the sales in euros of the orders so far, per minute and shop."""
    stream = stream_topic(spark, TOPIC, starting_offsets="earliest", client=mq)
    order = f.from_json(f.col("body").cast("string"), "shop string, at timestamp, euros double")
    return (
        stream.select(order.alias("order"))
        .select("order.*")
        .withWatermark("at", "2 minutes")
        .groupBy(f.window("at", "1 minute").alias("minute"), "shop")
        .agg(f.sum("euros").alias("euros"), f.count("*").alias("orders"))
    )


# %% [markdown]
# ## The run
# The query starts first, on an empty topic. Orders arrive while the query runs. The program reads the query's table
# until it counts all orders.


# %%
def main(directory: Path) -> dict[str, float]:
    """Send the orders, sum them as they arrive and draw `sales.png` into the directory. Returns the number of orders,
    the sum of their prices in euros, and the number of windows."""
    with raymq.connect() as mq:
        mq.admin.create_topic(TOPIC, queues=4)
        configs = {"spark.sql.session.timeZone": "UTC", "spark.sql.shuffle.partitions": "2"}
        with spark_session("orders", executor_memory="512m", configs=configs) as spark:
            query = (
                sales(spark, mq)
                .writeStream.outputMode("complete")
                .format("memory")
                .queryName("sales")
                .option("checkpointLocation", str(directory / "checkpoint"))
                .start()
            )
            send(mq)
            rows = await_orders(spark)
            query.stop()
    draw(rows, directory / "sales.png")
    figures = {"orders": sum(row.orders for row in rows), "euros": sum(row.euros for row in rows), "windows": len(rows)}
    print(figures)
    return {name: float(value) for name, value in figures.items()}


def await_orders(spark: SparkSession) -> list[DataFrame]:
    """Wait until the query's result counts every order, and return the rows of the result."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        rows: list[DataFrame] = spark.sql(
            "select minute.start as minute, shop, euros, orders from sales order by minute, shop"
        ).collect()
        if sum(row.orders for row in rows) == ORDERS:
            return rows
        time.sleep(0.5)
    raise TimeoutError(f"the windows lack orders after {PATIENCE_S:.0f} s")


# %% [markdown]
# ## The picture


# %%
def draw(rows: list[DataFrame], file: Path) -> None:
    """Draw the sales per minute, with the shops stacked."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    minutes = sorted({row.minute for row in rows})
    below = dict.fromkeys(minutes, 0.0)
    for shop in SHOPS:
        euros = {row.minute: row.euros for row in rows if row.shop == shop}
        heights = [euros.get(minute, 0.0) for minute in minutes]
        axes.bar([f"{minute:%H:%M}" for minute in minutes], heights, bottom=list(below.values()), label=shop)
        below = {minute: below[minute] + euros.get(minute, 0.0) for minute in minutes}
    axes.set_ylabel("euros per minute")
    axes.set_title("Sales, by the time of the order")
    figure.legend(loc="outside right upper")
    figure.savefig(file, dpi=100)


# %%
if __name__ == "__main__":
    place = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    with raymq.connect(embedded=True, data_dir=place / "store"):
        main(place)

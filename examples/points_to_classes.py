# %% [markdown]
# # From points to classes
#
# A topic holds measurements, each of two numbers, as bytes. A small model, trained in numpy, assigns each measurement
# to one of three classes. Ray Data reads the topic in place and runs the model on whole batches.

# %%
"""Label the messages of a topic with a small model in Ray Data, and draw `classes.png`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pyarrow as pa
import ray.data
from matplotlib.figure import Figure
from numpy.typing import NDArray

import raymq
import raymq.data

mpl.use("Agg")

TOPIC = "example-points"
POINTS = 20_000
LABELLED = 300
CENTRES = np.array([[0.0, 2.0], [-1.8, -1.0], [1.8, -1.0]])
SEED = 11

Points = NDArray[np.float64]
Classes = NDArray[np.int64]

# %% [markdown]
# ## The measurements
# The measurements are three clouds of points. A message has 16 bytes: two float64.


# %%
def measure(count: int, seed: int) -> tuple[Points, Classes]:
    """Return random points and the class of each point."""
    dice = np.random.default_rng(seed)
    classes = dice.integers(0, len(CENTRES), count)
    return CENTRES[classes] + dice.normal(0.0, 0.8, (count, 2)), classes


def send(mq: raymq.Client, points: Points) -> None:
    """Send one message for each point of the data set `points`. The message's body contains the point's
    coordinates."""
    size = points.itemsize * points.shape[1]
    offsets = np.arange(0, points.nbytes + 1, size, dtype=np.int32)
    bodies = pa.Array.from_buffers(
        pa.binary(), len(points), [None, pa.py_buffer(offsets.tobytes()), pa.py_buffer(points.tobytes())]
    )
    with mq.producer("sensors") as producer:
        producer.send_table(TOPIC, pa.table({"body": bodies}))


# %% [markdown]
# ## The model
# The model is a softmax regression: a matrix of weights, fitted by 500 steps of gradient descent on a few labelled
# points.


# %%
def train(points: Points, classes: Classes, steps: int = 500, rate: float = 0.5) -> Points:
    """Fit the model's weights. Returns a matrix with a row per coordinate, a row for the constant, and a column per
    class."""
    inputs, wanted = with_constant(points), np.eye(len(CENTRES))[classes]
    weights = np.zeros((inputs.shape[1], len(CENTRES)))
    for _ in range(steps):
        scores = np.exp(inputs @ weights)
        weights += rate / len(points) * inputs.T @ (wanted - scores / scores.sum(axis=1, keepdims=True))
    return weights


def with_constant(points: Points) -> Points:
    """Return the points with a third coordinate of 1."""
    return np.hstack([points, np.ones((len(points), 1))])


def model(weights: Points) -> Callable[[pa.Table], pa.Table]:
    """Return the function that Ray Data runs on each batch.

    Ray pickles an inner function by value, so workers do not need this file. The function must not use other names of
    this file.
    """

    def classify(batch: pa.Table) -> pa.Table:
        points = np.frombuffer(b"".join(batch.column("value").to_pylist()), np.float64).reshape(-1, 2)
        scores = np.hstack([points, np.ones((len(points), 1))]) @ weights
        return pa.table({"x": points[:, 0], "y": points[:, 1], "class": scores.argmax(axis=1)})

    return classify


# %% [markdown]
# ## The run
# `raymq.data.read_topic` fixes the offsets and reads no message yet. `columns` selects the model's input columns.
# Columns have the names of `ray.data.read_kafka`: the body of a message is its `value`.


# %%
def main(directory: Path) -> dict[str, float]:
    """Send the points, classify them and draw `classes.png` into the directory. Returns the number of classified
    points, and the share of points with the correct class."""
    points, classes = measure(POINTS, SEED)
    with raymq.connect() as mq:
        mq.admin.create_topic(TOPIC, queues=4)
        send(mq, points)
        ray.data.DataContext.get_current().enable_progress_bars = False
        weights = train(*measure(LABELLED, SEED + 1))
        found = (
            raymq.data.read_topic(TOPIC, columns=["value"])
            .map_batches(model(weights), batch_format="pyarrow", batch_size=4096)
            .to_pandas()
        )
    draw(found[["x", "y"]].to_numpy(), found["class"].to_numpy(), directory / "classes.png")
    right = correct_share(points, classes, found[["x", "y"]].to_numpy(), found["class"].to_numpy())
    print(f"{len(found):,} points, {right:.1%} of them in the class they were drawn from")
    return {"points": float(len(found)), "right": right}


def correct_share(points: Points, classes: Classes, seen: Points, found: Classes) -> float:
    """Return the share of points whose class was found correctly. Messages arrive in another order than they were sent,
    so the points and the results are sorted before they are compared."""
    order, other = np.lexsort(points.T), np.lexsort(seen.T)
    return float((classes[order] == found[other]).mean())


# %% [markdown]
# ## The picture


# %%
def draw(points: Points, classes: Classes, file: Path) -> None:
    """Draw the points, each in the colour of its class, and save the image in `file`."""
    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    axes.scatter(points[:, 0], points[:, 1], c=classes, s=1, cmap="viridis")
    axes.scatter(CENTRES[:, 0], CENTRES[:, 1], c="red", marker="x", label="centre of a class")
    axes.set_title(f"{len(points):,} messages, classified")
    axes.legend()
    figure.savefig(file, dpi=100)


# %%
if __name__ == "__main__":
    place = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    with raymq.connect(embedded=True, data_dir=place / "store"):
        main(place)

"""Helper program of test_network_cuts.py: executes requests of the test on a machine in another network.

    python tests/chaos/nodes/remote_group.py BROKER REPLICAS

The program connects to raymq in the Ray cluster that RAY_ADDRESS names. Each line of standard input is a request with
its arguments, as JSON. Each line of standard output is the result or the error of a request.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import raymq
from raymq.common.errors import RaymqError
from tests.support.history.log_rules import check_log
from tests.support.history.observations import Observations, Seen, TailWatcher, acknowledgements_in
from tests.support.history.waiting import eventually
from tests.support.history.watcher import Watcher
from tests.support.history.workload import read_back
from tests.support.replicas.ray_replicas import HEAL_TIMEOUT_S, RayReplicas


@contextmanager
def watching(mq: raymq.Client, topic: str) -> Iterator[Observations]:
    """Read a topic, and ask for the ends of its queues and for the committed offsets, during a `with` block. Returns
    what was observed, also while servers do not answer."""
    observations = Observations()
    reader = Watcher(mq, topic, "watcher", patient=True, observations=observations)
    tails = TailWatcher(mq, topic, observations, "watcher")
    with reader, tails:
        yield observations
    reader.check()
    tails.check()


def has_commit(observations: Observations) -> bool:
    """Return True if a committed offset other than 0 was observed."""
    return any(one.seen is Seen.COMMITTED and one.offset > 0 for one in observations)


def main(broker: str, replicas: int) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Redirect standard output to standard error, because only results may be printed to standard output.
    group = RayReplicas(broker, replicas)

    def lead(replica: int) -> None:
        """Make a replica the master, and wait until all replicas are in sync."""
        group.settled()
        group.lead(replica)
        group.settled()

    with raymq.connect() as mq, ExitStack() as stack:
        observed: list[Observations] = []

        def watch(topic: str) -> None:
            """Create a topic, and observe it until `check_log`."""
            mq.admin.create_topic(topic, queues=4)
            observed.append(stack.enter_context(watching(mq, topic)))

        def check(journals: list[str], seed: int) -> int:
            """Check that the observations of the newest topic and the acknowledged sends fit a log. Returns their
            number. First waits for a commit of the reader, because the cut may have hindered all earlier commits."""
            eventually(lambda: has_commit(observed[-1]), "a commit of the reader", HEAL_TIMEOUT_S)
            stack.close()
            seen = [*observed.pop(), *(one for path in journals for one in acknowledgements_in(Path(path)))]
            check_log(seen, random.Random(seed))
            return len(seen)

        def change(count: int) -> None:
            """Change the number of replicas, and wait until the change has ended. From then on, the group has settled
            when `count` replicas are in sync."""
            mq.admin.change_replicas(broker, count)
            report = mq.admin.wait_for_replicas(broker, HEAL_TIMEOUT_S)
            assert report.change == "", report
            group.expect(count)

        def read(topic: str) -> list[Any]:
            """Return the producer and the sequence number of each message, by queue."""
            return [
                [astuple(queue), [astuple(sent) for sent in sents]] for queue, sents in read_back(mq, topic).items()
            ]

        questions: dict[str, Callable[..., Any]] = {
            "watch": watch,
            "check_log": check,
            "account": group.account,
            "settled": group.settled,
            "equal_end": group.equal_end,
            "change": change,
            "lead": lead,
            "read": read,
        }
        for line in sys.stdin:
            question, *arguments = json.loads(line)
            try:
                answer = {"answer": questions[question](*arguments)}
            except (RaymqError, AssertionError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer, default=str) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

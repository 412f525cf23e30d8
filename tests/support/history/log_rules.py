"""Decides whether the observations of a chaos test fit a log, and plants faults that the decision must find.

The rules, each a kind of violation:

    two values       an offset of a queue has two bodies
    two places       a body is at two places
    unseen           a question asked after an acknowledgement shows an end of the queue before the acknowledged offset
    end went back    a question asked after the answer of another one, or after a read, shows an earlier end
    skipped          a reader got an offset, and never the offset before it, although the reader had begun earlier
    commit went back a question asked after the answer of another one shows an earlier committed offset of the group
    aborted seen     a reader got a message whose transaction was rolled back

Two requests that overlapped in time may have happened in either order, so they never contradict each other.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final

from raymq.common.message import MessageQueue
from tests.support.history.observations import Observation, Seen

RULES: Final = (
    "two values",
    "two places",
    "unseen",
    "end went back",
    "skipped",
    "commit went back",
    "aborted seen",
)
_PLACED: Final = (Seen.ACKNOWLEDGED, Seen.READ)


def violations(observations: Iterable[Observation]) -> dict[str, list[str]]:
    """Return the violations of each rule, as sentences; rules without a violation are left out."""
    seen = list(observations)
    placed = [one for one in seen if one.seen in _PLACED]
    tails = [one for one in seen if one.seen is Seen.TAIL]
    commits = [one for one in seen if one.seen is Seen.COMMITTED]
    acknowledged = [one for one in placed if one.seen is Seen.ACKNOWLEDGED]
    # An end is never before a message that somebody has read, nor before an end that somebody was told.
    known = [*tails, *(replace(one, offset=one.offset + 1) for one in placed if one.seen is Seen.READ)]
    aborted = {one.text for one in seen if one.seen is Seen.ABORTED}
    found = {
        "two values": _differing(((one.queue, one.offset), one.text) for one in placed),
        "two places": _differing((one.text, (one.queue, one.offset)) for one in placed),
        "unseen": _went_back([replace(one, offset=one.offset + 1) for one in acknowledged], tails),
        "end went back": _went_back(known, tails),
        "skipped": _skipped([one for one in placed if one.seen is Seen.READ]),
        "commit went back": _went_back(commits, commits),
        "aborted seen": [f"{one.actor} got {one.text!r}" for one in placed if one.text in aborted],
    }
    return {rule: sentences for rule, sentences in found.items() if sentences}


def _differing(pairs: Iterable[tuple[Hashable, object]]) -> list[str]:
    """Return a sentence for each key that has more than one value."""
    values: dict[Hashable, set[object]] = defaultdict(set)
    for key, value in pairs:
        values[key].add(value)
    return [f"{key} has {sorted(map(str, several))}" for key, several in values.items() if len(several) > 1]


def _went_back(known: Sequence[Observation], later: Sequence[Observation]) -> list[str]:
    """Return a sentence for each observation in `later` that shows a smaller offset than an observation in `known`
    whose answer was there before the question of the later one was asked."""
    answers: dict[tuple[MessageQueue | None, str], list[Observation]] = defaultdict(list)
    for one in sorted(known, key=lambda one: one.end_s):
        answers[one.queue, one.actor if one.seen is Seen.COMMITTED else ""].append(one)
    ends_s = {place: [one.end_s for one in ordered] for place, ordered in answers.items()}
    highest = {place: list(accumulate((one.offset for one in all_), max)) for place, all_ in answers.items()}
    sentences = []
    for one in later:
        place = one.queue, one.actor
        before = bisect_left(ends_s.get(place, ()), one.begin_s)
        if before and highest[place][before - 1] > one.offset:
            sentences.append(f"{one.queue} showed {one.offset} after {highest[place][before - 1]}: {one}")
    return sentences


def _skipped(reads: Sequence[Observation]) -> list[str]:
    """Return a sentence for each message that a reader got without the message before it. A reader may get messages
    again, and may begin anywhere."""
    got: dict[tuple[str, MessageQueue | None], set[int]] = defaultdict(set)
    for one in reads:
        got[one.actor, one.queue].add(one.offset)
    return [
        f"{actor} got offset {offset} of {queue}, and never the offset before it"
        for (actor, queue), offsets in got.items()
        for offset in sorted(offsets)
        if offset - 1 not in offsets and offset != min(offsets)
    ]


def planted(observations: Sequence[Observation], rule: str, rng: random.Random) -> list[Observation]:
    """Return the observations with one fault that violates `rule`, at a place that `rng` chooses.

    The observations must contain reads, tails and commits, and reads of one reader at three neighbouring offsets.
    """
    made = list(observations)
    reads = [one for one in made if one.seen is Seen.READ]
    end_s = max(one.end_s for one in made) + 1
    read = rng.choice(reads)
    match rule:
        case "two values":
            made.append(replace(read, text=read.text + b"?"))
        case "two places":
            made.append(replace(read, offset=read.offset + 10**6, actor="another reader"))
        case "unseen":
            one = rng.choice([one for one in made if one.seen is Seen.ACKNOWLEDGED])
            made.append(Observation(Seen.TAIL, end_s, end_s, one.queue, one.offset))
        case "end went back":
            one = rng.choice([one for one in made if one.seen is Seen.TAIL and one.offset > 0])
            made.append(Observation(Seen.TAIL, end_s, end_s, one.queue, one.offset - 1))
        case "skipped":
            places = {(one.actor, one.queue, one.offset) for one in reads}
            inner = [place for place in places if {(*place[:2], place[2] + step) for step in (-1, 1)} <= places]
            lost = rng.choice(sorted(inner, key=str))
            made = [one for one in made if one.seen is not Seen.READ or (one.actor, one.queue, one.offset) != lost]
        case "commit went back":
            one = rng.choice([one for one in made if one.seen is Seen.COMMITTED and one.offset > 0])
            made.append(replace(one, begin_s=end_s, end_s=end_s, offset=one.offset - 1))
        case "aborted seen":
            made.append(Observation(Seen.ABORTED, end_s, end_s, text=read.text))
        case _:
            raise ValueError(f"there is no rule {rule!r}; the rules are {RULES}")
    return made


def check_log(observations: Iterable[Observation], rng: random.Random, rules: Sequence[str] = RULES) -> None:
    """Raise AssertionError if the observations do not fit a log, or if a planted fault is not found.

    `rules`: the rules for which a fault is planted. Leave out a rule if the test has no observations of its kind.
    """
    seen = list(observations)
    print(f"{len(seen)} observations, faults planted for: {', '.join(rules)}")
    found = violations(seen)
    assert found == {}, {rule: sentences[:3] for rule, sentences in found.items()}
    missed = [rule for rule in rules if rule not in violations(planted(seen, rule, rng))]
    assert missed == []

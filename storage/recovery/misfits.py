"""Finds the records whose place (queue offset, queue id or topic) the disk has changed, by comparing adjacent records.

No checksum covers these fields, unless the property CRC is on. But the log has every record of a queue, in the order of
the queue's offsets. So a record with one changed bit causes two breaks. In the queue that the record names, its offset
does not fit between the offsets of the adjacent records. In its true queue, exactly its offset is missing. A record
counts as changed if one changed bit explains the breaks:

- A consume-queue entry (unit) points to the record, at a place that differs in one bit from the place that the record
  names. After a clean stop these are the entries in the queues. After a crash these are the entries that recovery has
  removed, which are right unless the power failed.
- The adjacent records prove it. With that bit changed back, the record's offset is consecutive with both adjacent
  records, or at least two more pairs of adjacent records are consecutive than before. One more pair is enough for
  a repeated offset above 0, or a new queue that begins in its middle, because only damage causes these. One more pair
  is also enough if the producer's sequence continues at the true place and not at the named place. That is, the
  producer of the previous record at the true place has sent this record next, and has not sent the previous record at
  the named place.

If several explanations are equally good, all records in them count as damaged, without a place: none of their bytes are
lost, and none is served as intact. A record that fits in no place counts as damaged, too. A repeat of offset 0 may be a
topic that RocketMQ deleted and created again. A jump ahead at the end of a queue may be genuine. Such a record is
trusted unless a queue entry or a producer contradicts it. So if a crash lost an entry, a change of the last record of
its queue may stay unnoticed. Two changed bits, or a changed inner batch, are not searched for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import islice, pairwise
from typing import Final, NamedTuple

from raymq.records.format.encode import ProducerSequence
from storage.dispatch.multi_dispatch import QueueKey, QueueUnit
from storage.log.holes import PLACE_REASON
from storage.recovery.claims import PlaceClaim, Survey, one_bit_away

CHANGED_RECORDS_MAX: Final = 64
"""Maximum number of changed records that recovery finds in one surveyed part of the log. Further records are
trusted."""
BREAKS_MAX: Final = 256
"""Maximum number of breaks that recovery examines. A break is a position at which a queue's offsets are not
consecutive."""
LACKING_MAX: Final = 8
"""Maximum number of missing queue offsets, beginning with the first, that recovery examines in one gap of a queue's
offsets. The missing records may lie in other queues."""
NEAR_MAX: Final = 256
"""Maximum number of records that recovery examines for each missing queue offset."""

SENT_BEFORE_MAX: Final = 64
"""Number of records of a queue, before a given record, in which the search looks for the previous message of the
record's producer."""

LeadsTo = Callable[[QueueUnit, int, int], bool]
"""Function (place, physical offset, size). Returns True if the consume-queue entry (unit) at this place (queue and
queue offset) points to the record with this physical offset and size."""


class Change(NamedTuple):
    """The true place (queue and queue offset) of a changed record, None if the place is unknown. Also the reason for
    recording the record as damaged (a hole).

    If `is_sure` is False, one of two records has changed, and it is unknown which of them. `place` is then the true
    place of the record that has changed.
    """

    place: QueueUnit | None
    reason: str
    is_sure: bool = True


class _Point(NamedTuple):
    """The queue offset of a record, and the record's row in the list of records that recovery searches for changed
    records. The row is -1 for the queue's last record before the searched part of the log."""

    row: int
    queue_offset: int


class _Move(NamedTuple):
    """A possible explanation of breaks: the disk has changed a record, whose true place is `place`. At a break, the
    queue offsets of adjacent records are not consecutive. `row`: the record's index in the list of claims (places that
    records name). Explanations are sorted by how much they explain, the best first."""

    # Change in the number of breaks if this explanation is true; negative if it removes breaks. A break is a pair of
    # adjacent records of a queue whose queue offsets are not consecutive.
    gain: int
    # False if the record fits exactly between its neighbours at `place`. Its queue offset is then one more than the
    # previous record's offset, and one less than the next record's offset.
    is_open: bool
    # False if the producer's sequence numbers support this explanation (that the record belongs to `place`): the record
    # continues its producer's sequence at `place`, but not at the queue and queue offset that it names.
    is_unsupported: bool
    row: int
    place: QueueUnit


class Misfits:
    """Searches one surveyed part of the log for records whose stored queue or queue offset has been changed by the
    disk."""

    def __init__(
        self,
        survey: Survey,
        bases: dict[QueueKey, int],
        default_base: int | None,
        leads_to: LeadsTo,
        raw_topic: Callable[[PlaceClaim], bytes],
        sequence_of: Callable[[PlaceClaim], ProducerSequence | None],
    ) -> None:
        """Prepare a search for records whose place (queue and queue offset) was changed. `survey`: the records of the
        searched part of the log. `bases`: the next offset of each queue at the start of this part. `default_base`: the
        next offset of all other queues; None if unknown. `raw_topic` reads the topic of a record, and `sequence_of`
        reads its producer sequence."""
        self._claims, self._unknown = survey.claims, sorted(survey.unknown)
        self._bases, self._default_base, self._leads_to, self._raw_topic = bases, default_base, leads_to, raw_topic
        self._sequence_of, self._batch_keys = sequence_of, survey.batch_keys
        self._chains: dict[QueueKey, list[int]] = {}
        self._by_offset: dict[int, list[int]] = {}
        self._places = [claim.place for claim in survey.claims]
        for index, claim in enumerate(survey.claims):
            self._by_offset.setdefault(claim.place.queue_offset, []).append(index)
            if self._is_chained(index):
                self._chains.setdefault(claim.place.key, []).append(index)
        self._deleted = {claim.place.key[0] for claim in survey.claims if not claim.is_chained}
        self._trusted = {index for index, claim in enumerate(survey.claims) if not claim.is_movable}
        self._found: dict[int, Change] = {}
        # The breaks of each queue that has any. A break is a pair of adjacent records whose queue offsets are not
        # consecutive. `_stale`: the queues whose breaks must be computed again.
        self._breaks_of: dict[QueueKey, list[tuple[_Point, _Point]]] = {}
        self._stale = set(self._chains)

    def find(self, suspects: Iterable[int], named: Callable[[int], bool]) -> dict[int, Change]:
        """Find the records whose stored queue or queue offset has been changed by the disk. Return the changes by
        physical offset. `suspects`: physical offsets of records that do not match their queues. `named` returns True
        for a physical offset whose record an earlier recovery treated as changed."""
        index_of = {claim.physical_offset: index for index, claim in enumerate(self._claims)}
        doubted = [index for index, claim in enumerate(self._claims) if named(claim.physical_offset)]
        first = {index_of[offset] for offset in suspects if offset in index_of}
        gaps = [*self._breaks(), *self._excused_gaps()]
        self._ask_units({*first, *doubted, *(one for pair in gaps for one in self._near(*pair))})
        while len(self._found) < CHANGED_RECORDS_MAX:
            moves = sorted({move for pair in self._breaks() for one in self._near(*pair) for move in self._moves(one)})
            if not moves:
                break
            best = moves[0]
            rivals = [
                move
                for move in moves[1:]
                if move[:3] == best[:3] and (move.row == best.row or move.place == best.place)
            ]
            if rivals:
                rows = sorted({best.row, *(move.row for move in rivals)})
                claimed = {self._places[row] for row in rows}
                places: list[QueueUnit | None] = [None] * len(rows)
                if len(rows) == 2 and len(claimed) == 1 and {move.place for move in rivals} == {best.place}:
                    # Both records name the same place (queue and offset). One of the two records was changed and
                    # belongs to another place, but it is unknown which record. Reserve the named place, and the place
                    # to which the changed record probably belongs. Then no queue offset is missing in either case.
                    places = [*claimed, best.place]
                for row, place in zip(rows, places, strict=True):
                    self._give_up(row, place)
            else:
                self._move(best.row, best.place)
        for index in sorted({pair[1].row for pair in self._breaks()} | set(doubted)):
            if index >= 0 and index not in self._found and index not in self._trusted:
                before, after = self._around(index)
                if self._does_not_belong(index, before, after) or (index in doubted and not self._fits(index)):
                    self._give_up(index)
        return {self._claims[index].physical_offset: change for index, change in self._found.items()}

    def _is_chained(self, index: int) -> bool:
        """Return True if claim `index` must have the queue offset that follows the previous claim of the same queue. A
        claim is a record with the queue and queue offset that it names. False for inner batches."""
        return self._claims[index].is_chained and self._claims[index].place.key not in self._batch_keys

    def _breaks(self) -> list[tuple[_Point, _Point]]:
        """Return the first breaks in the queues of the surveyed records, at most BREAKS_MAX. A break is a pair of
        adjacent records of a queue whose queue offsets are not consecutive."""
        for key in self._stale:
            self._breaks_of.pop(key, None)
            found = [pair for pair in self._pairs(key) if self._is_break(*pair)]
            if found:
                self._breaks_of[key] = found
        self._stale.clear()
        return sorted((pair for found in self._breaks_of.values() for pair in found), key=lambda pair: pair[1])[
            :BREAKS_MAX
        ]

    def _excused_gaps(self) -> list[tuple[_Point, _Point]]:
        """Return the first gaps that unreadable bytes may explain, at most BREAKS_MAX. A changed record may lie in such
        a gap, too."""
        pairs = (pair for key in self._chains if self._unknown for pair in self._pairs(key))
        gaps = (pair for pair in pairs if pair[1].queue_offset > pair[0].queue_offset + 1 and not self._is_break(*pair))
        return list(islice(gaps, BREAKS_MAX))

    def _pairs(self, key: QueueKey) -> Iterable[tuple[_Point, _Point]]:
        """Return the pairs of adjacent records of a queue, in order. If the queue's base is known, the first pair
        begins with the last record before the surveyed part of the log."""
        points = [self._point(index) for index in self._chains[key]]
        base = self._base(key)
        return pairwise(points if base is None else [_Point(-1, base - 1), *points])

    def _base(self, key: QueueKey) -> int | None:
        """Return the next offset of a queue at the start of the log range that recovery searches for changed records.
        Return None if this offset is unknown.

        The offset is unknown if the topic was deleted. A replica may have recorded the deletion too late, and then it
        lacks the units (entries) of the first records after the deletion.
        """
        return None if key[0] in self._deleted else self._bases.get(key, self._default_base)

    def _is_break(self, before: _Point | None, after: _Point | None) -> bool:
        """True if a record's queue offset does not follow the offset of the previous record in its queue, and no
        unreadable bytes explain the gap."""
        if before is None or after is None or after.queue_offset == before.queue_offset + 1:
            return False
        lacking = after.queue_offset - before.queue_offset - 1
        start = self._claims[before.row].physical_offset if before.row >= 0 else 0
        between = bisect_left(self._unknown, self._claims[after.row].physical_offset) - bisect_left(
            self._unknown, start
        )
        return lacking < 0 or not between

    def _near(self, before: _Point, after: _Point) -> set[int]:
        """Return the indices of the records that may have caused a break: a pair of adjacent records of a queue whose
        queue offsets are not consecutive. These are the pair itself, and records between the pair in the log that name
        an offset missing in the queue."""
        found = {before.row, after.row} - {-1}
        for offset in range(before.queue_offset + 1, min(after.queue_offset, before.queue_offset + 1 + LACKING_MAX)):
            named = self._by_offset.get(offset, [])
            found.update(named[bisect_left(named, before.row + 1) : bisect_left(named, after.row)][:NEAR_MAX])
        return found

    def _around(self, index: int, place: QueueUnit | None = None) -> tuple[_Point | None, _Point | None]:
        """Return the record before and the record after record `index`, in the queue that the record claims (names).
        With `place` (queue and queue offset), return the two records between which the record would lie at `place`."""
        key = (place or self._places[index]).key
        chain = self._chains.get(key, [])
        at = bisect_left(chain, index)
        behind = at + (at < len(chain) and chain[at] == index)
        before = self._point(chain[at - 1]) if at else None
        if before is None and (base := self._base(key)) is not None:
            before = _Point(-1, base - 1)
        return before, self._point(chain[behind]) if behind < len(chain) else None

    def _point(self, index: int) -> _Point:
        return _Point(index, self._places[index].queue_offset)

    def _fits(self, index: int) -> bool:
        """True if a claim (a record with the place that it names) fits its queue. Its queue offset is then one more
        than the offset of the previous record, and one less than the offset of the next record."""
        before, after = self._around(index)
        offset = self._places[index].queue_offset
        return bool(before and after and before.queue_offset + 1 == offset == after.queue_offset - 1)

    def _does_not_belong(self, index: int, before: _Point | None, after: _Point | None) -> bool:
        """True if the record of a claim (a record with the queue and offset that it names) breaks the order of its
        queue's offsets. That is, the records before and after it in the queue have consecutive offsets, so no offset is
        left for the record."""
        is_whole = bool(before and after and before.queue_offset + 1 == after.queue_offset)
        return is_whole and self._is_break(before, self._point(index)) and self._is_break(self._point(index), after)

    def _moves(self, index: int) -> Iterable[_Move]:
        """Yield each place (queue and queue offset) to which a record may have belonged originally. The assumption is
        that the disk changed the place in the record, which caused breaks in the queues' offsets. `index`: the index of
        the record's claim, which is the place that the record names."""
        claim = self._claims[index]
        if index in self._trusted or index in self._found:
            return
        before, after = self._around(index)
        next_to = [point.queue_offset + step for point, step in ((before, 1), (after, -1)) if point is not None]
        for place in one_bit_away(claim.place, self._raw_topic(claim)):
            is_near = place.queue_offset in next_to if place.key == claim.place.key else self._may_hold(place)
            move = self._explain(index, place) if is_near else None
            if move is not None:
                yield move

    def _may_hold(self, place: QueueUnit) -> bool:
        return (place.key in self._chains or place.key in self._bases) and place.key not in self._batch_keys

    def _explain(self, index: int, place: QueueUnit) -> _Move | None:
        """Decide if the disk has changed the queue or queue offset in the record `index`. If `place` (queue and queue
        offset) would close gaps in the queues' offsets, returns a move of the record to `place`. Returns None if it
        closes no gap, or if too little supports it."""
        gain = self._gain(index, place)
        if gain >= 0:
            return None
        before, after = self._around(index, place)
        is_next = before is not None and before.queue_offset + 1 == place.queue_offset
        is_previous = after is not None and place.queue_offset + 1 == after.queue_offset
        is_closed = is_next and is_previous
        is_supported = is_next and self._continues(before, index)
        if place.key != self._places[index].key:
            is_supported = is_supported and not self._goes_on_where_named(index)
        # If the record names queue offset 0, the producer's sequence does not prove its queue and offset. The producer
        # also continues its sequence at offset 0 of a topic that was deleted and created again.
        is_sent_next = is_supported and self._places[index].queue_offset > 0
        is_proven = gain <= -2 or is_closed or is_sent_next or self._is_impossible(index)
        return (
            _Move(gain, not is_closed, not is_supported, index, place)
            if is_proven and (is_next or is_previous)
            else None
        )

    def _goes_on_where_named(self, index: int) -> bool:
        """True if the record of claim `index` continues its producer's sequence in the queue that the record names. A
        claim is a record with the queue and queue offset that it names. The producer's previous message must be among
        the last records before it in that queue. A record that names the same queue offset does not count as the
        previous message."""
        chain, offset = self._chains.get(self._places[index].key, []), self._places[index].queue_offset
        at = bisect_left(chain, index)
        before = [row for row in chain[max(at - SENT_BEFORE_MAX, 0) : at] if self._places[row].queue_offset != offset]
        return any(self._continues(self._point(row), index) for row in before)

    def _continues(self, before: _Point | None, index: int) -> bool:
        """True if the record `before` and the record of claim `index` have consecutive sequence numbers of one
        producer. A claim is a record with the queue and queue offset that it names."""
        if before is None or before.row < 0:
            return False
        first, second = (self._sequence_of(self._claims[row]) for row in (before.row, index))
        if first is None or second is None:
            return False
        is_same = (first.producer_id, first.epoch) == (second.producer_id, second.epoch)
        return is_same and first.first_sequence + 1 == second.first_sequence

    def _gain(self, index: int, place: QueueUnit) -> int:
        """Return the change in the number of breaks (gaps or repeats in queue offsets) if a record moved to the queue
        and queue offset `place`. The result is negative if breaks disappear. `index`: the index of the record's claim,
        which is the queue and queue offset that the record names."""
        here, there = self._point(index), _Point(index, place.queue_offset)
        same_queue = place.key == self._places[index].key
        gain = 0
        if self._is_chained(index):
            before, after = self._around(index)
            gain -= self._is_break(before, here) + self._is_break(here, after)
            gain += not same_queue and self._is_break(before, after)
        before, after = self._around(index, place)
        if not (same_queue and self._is_chained(index)):
            gain -= self._is_break(before, after)
        return gain + self._is_break(before, there) + self._is_break(there, after)

    def _is_impossible(self, index: int) -> bool:
        """True if this claim (a record with the place that it names) and an adjacent claim of its queue contradict each
        other. Either the later claim names an offset above 0 that is not higher than the earlier claim's offset. Or the
        first claim of a new queue does not name offset 0."""
        before, after = self._around(index)
        here = self._point(index)
        pairs = [pair for pair in ((before, here), (here, after)) if self._is_break(*pair)]
        return any(
            first == (-1, -1) or 0 < second.queue_offset <= first.queue_offset
            for first, second in pairs
            if first is not None and second is not None
        )

    def _ask_units(self, indices: set[int]) -> None:
        """Use the queue units to decide on suspect claims. A claim is a record, with the place (queue and queue offset)
        that the record names. If the unit at this place points to the record, the claim is trusted. Otherwise, search
        the places that differ from the named place in one bit. If the unit of exactly one of them points to the record,
        the claim moves to that place."""
        doubtful: dict[int, QueueUnit] = {}
        waiting = sorted(indices)
        for index in waiting:
            claim = self._claims[index]
            if index in self._trusted or index in doubtful or self._fits(index) or len(doubtful) >= BREAKS_MAX:
                continue
            if self._leads_to(claim.place, claim.physical_offset, claim.size):
                self._trusted.add(index)
                continue
            places = [
                place
                for place in one_bit_away(claim.place, self._raw_topic(claim))
                if self._leads_to(place, claim.physical_offset, claim.size)
            ]
            if len(places) == 1:
                doubtful[index] = places[0]
                # A record that names the true place of this record has changed, too.
                named = self._by_offset.get(places[0].queue_offset, [])[:NEAR_MAX]
                waiting += [one for one in named if self._claims[one].place == places[0]]
        self._move_allowed(doubtful)

    def _move_allowed(self, doubtful: dict[int, QueueUnit]) -> None:
        """Move the records that queue units contradict to the places of these units, if the adjacent records allow it.
        A move may allow further moves."""
        unknown, count = self._unknown, -1
        while count < len(self._found) < CHANGED_RECORDS_MAX:
            count = len(self._found)
            for index, place in doubtful.items():
                if index in self._found:
                    continue
                # A gap between two records may be the place of a doubtful record, as of unreadable bytes.
                others = [one for one in doubtful if one != index and one not in self._found]
                self._unknown = sorted([*unknown, *(self._claims[one].physical_offset for one in others)])
                if self._allows(index, place):
                    self._move(index, place)
        self._unknown = unknown

    def _allows(self, index: int, place: QueueUnit) -> bool:
        """Return True if the record at `index` may belong to `place` (queue and queue offset). A queue unit at `place`
        points to the record, although the record names another place.

        The records next to it must not contradict `place`, neither in the queue that the record names nor in the queue
        of `place`. If both places are in one queue, these records or their units must even confirm `place`: after a
        gap, RocketMQ writes all units at wrong offsets.
        """
        gain = self._gain(index, place)
        if gain == 0 and place.key == self._places[index].key:
            rows = [point.row for point in self._around(index) if point is not None and point.row >= 0]
            return bool(rows) and all(map(self._has_own_unit, rows))
        return gain <= 0

    def _has_own_unit(self, row: int) -> bool:
        """Return True if a queue unit points to the record of claim `row` from the place that the record names."""
        claim = self._claims[row]
        return self._leads_to(claim.place, claim.physical_offset, claim.size)

    def _remove(self, index: int) -> None:
        if self._is_chained(index):
            key = self._claims[index].place.key
            chain = self._chains[key]
            del chain[bisect_left(chain, index)]
            self._stale.add(key)

    def _move(self, index: int, place: QueueUnit) -> None:
        claim = self._claims[index]
        self._remove(index)
        chain = self._chains.setdefault(place.key, [])
        chain.insert(bisect_left(chain, index), index)
        self._stale.add(place.key)
        self._places[index] = place
        named, true = (f"offset {one.queue_offset} of {one.key[0]}:{one.key[1]}" for one in (claim.place, place))
        self._found[index] = Change(place, f"{PLACE_REASON}: the record names {named}, but belongs at {true}")

    def _give_up(self, index: int, place: QueueUnit | None = None) -> None:
        """Treat a record as damaged, because the queue and queue offset that it names (its claim) contradict the
        adjacent records. `index`: the index of the claim. `place`: the queue and queue offset that the record may have
        had before the damage. No other record gets this place."""
        claim = self._claims[index]
        self._remove(index)
        self._unknown.insert(bisect_left(self._unknown, claim.physical_offset), claim.physical_offset)
        # This damaged record may have belonged to any queue. So the breaks (positions at which a queue's offsets are
        # not consecutive) of all queues must be computed again.
        self._stale.update(self._breaks_of)
        named = f"offset {claim.place.queue_offset} of {claim.place.key[0]}:{claim.place.key[1]}"
        reason = f"{PLACE_REASON}: the record names {named}, which contradicts the neighbouring records"
        self._found[index] = Change(place, reason, is_sure=False)

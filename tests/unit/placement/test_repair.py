"""Tests of repairs of a broker group: when and on which node a replica starts from an empty directory, and how replicas
leave a drained node."""

from __future__ import annotations

from dataclasses import replace

from placement.repair import Moves, Repair, ReplicaGroupView
from placement.replica_nodes import Node
from raymq.common.names import StorageName
from storage.replication.epochs import ReplicaMembers

A0, A1, A2 = (StorageName("broker-a", replica) for replica in range(3))
LED = {"broker-a": ReplicaGroupView(0, frozenset({0, 1}))}
WHOLE = {"broker-a": ReplicaGroupView(0, frozenset({0, 1, 2}))}
NODES = [Node(f"n{index}", f"10.0.0.{index}", {f"broker-a-{index}": 100}) for index in range(3)]
SPARE = Node("n3", "10.0.0.3")
EVERYWHERE = {A0: "n0", A1: "n1", A2: "n2"}


def repair(min_in_sync: int = 1) -> Repair:
    return Repair([A0, A1, A2], spread=True, replace_after_s=60.0, min_in_sync=min_in_sync)


def drained(index: int) -> list[Node]:
    node = NODES[index]
    return [*NODES[:index], Node(node.node_id, node.ip, node.stores, draining=True), *NODES[index + 1 :]]


def without(*names: StorageName) -> dict[StorageName, str]:
    return {name: node for name, node in EVERYWHERE.items() if name not in names}


def test_where_every_replica_has_an_actor_nothing_is_done():
    assert repair().decide([*NODES, SPARE], EVERYWHERE, WHOLE, 0.0) == Moves()


def test_a_node_that_stays_away_is_replaced_after_the_time_that_was_set():
    one, nodes = repair(), [*NODES[:2], SPARE]
    early = one.decide(nodes, without(A2), LED, 100.0)
    assert early.start == {}
    assert "in 60 s" in early.notes[A2]
    assert one.decide(nodes, without(A2), LED, 159.0).start == {}
    assert one.decide(nodes, without(A2), LED, 160.0).start == {A2: SPARE}


def test_the_replacement_time_restarts_if_the_replica_returned():
    one, nodes = repair(), [*NODES[:2], SPARE]
    one.decide(nodes, without(A2), LED, 0.0)
    one.decide([*NODES, SPARE], EVERYWHERE, WHOLE, 30.0)
    assert one.decide(nodes, without(A2), LED, 70.0).start == {}


def test_a_node_that_returns_is_taken_back_at_once_under_its_new_id_and_whoever_leads():
    back = Node("n9", "10.0.0.2", {"broker-a-2": 100})
    nobody = {"broker-a": ReplicaGroupView(None, frozenset({2}))}
    assert repair().decide([*NODES[:2], SPARE, back], without(A2), nobody, 0.0).start == {A2: back}


def test_the_directory_of_a_member_of_the_sync_state_set_is_waited_for_however_long():
    moves = [repair().decide([*NODES[:2], SPARE], without(A2), WHOLE, now_s) for now_s in (0.0, 1e9)]
    assert [one.start for one in moves] == [{}, {}]
    assert "bring the node back" in moves[1].notes[A2]


def test_nothing_is_replaced_while_nobody_leads():
    one, nobody = repair(), {"broker-a": ReplicaGroupView(None, frozenset({0, 1}))}
    one.decide([*NODES[:2], SPARE], without(A2), nobody, 0.0)
    assert one.decide([*NODES[:2], SPARE], without(A2), nobody, 1e9).start == {}


def test_the_note_for_a_replica_without_a_node_has_the_rule_and_the_nodes():
    one = repair()
    one.decide(NODES[:2], without(A2), LED, 0.0)
    moves = one.decide(NODES[:2], without(A2), LED, 60.0)
    assert moves.start == {}
    assert "different nodes" in moves.notes[A2]
    assert "10.0.0.1" in moves.notes[A2]


def test_two_missing_replicas_are_not_rebuilt_on_one_node():
    one, alone = repair(), {"broker-a": ReplicaGroupView(0, frozenset({0}))}
    one.decide([NODES[0], SPARE], without(A1, A2), alone, 0.0)
    moves = one.decide([NODES[0], SPARE], without(A1, A2), alone, 60.0)
    assert moves.start == {A1: SPARE}
    assert "different nodes" in moves.notes[A2]


def test_a_drained_node_gives_up_a_slave_when_all_are_in_sync():
    one = repair()
    # Replica 2 may leave its drained node because it is not in the sync-state set. Replica 1 may leave only if all
    # replicas are in sync.
    assert one.decide([*drained(2), SPARE], EVERYWHERE, LED, 0.0).vacate == A2
    assert one.decide([*drained(1), SPARE], EVERYWHERE, LED, 0.0).vacate is None
    assert one.decide([*drained(1), SPARE], EVERYWHERE, WHOLE, 0.0).vacate == A1


def test_a_replica_outside_the_set_moves_without_waiting():
    # While replica 2 of the drained node is still in the sync-state set, it does not start on another node.
    assert repair().decide([*drained(2), SPARE], without(A2), WHOLE, 0.0).start == {}
    assert repair().decide([*drained(2), SPARE], without(A2), LED, 0.0).start == {A2: SPARE}


def test_a_master_on_a_drained_node_hands_over_first():
    moves = repair().decide([*drained(0), SPARE], EVERYWHERE, WHOLE, 0.0)
    assert (moves.hand_over, moves.vacate) == ({A0: 1}, None)


def test_a_drained_node_keeps_a_replica_without_another_place():
    moves = repair().decide(drained(2), EVERYWHERE, WHOLE, 0.0)
    assert moves.vacate is None
    assert "different nodes" in moves.notes[A2]


def test_draining_does_not_leave_fewer_in_sync_than_appends_need():
    moves = repair(min_in_sync=3).decide([*drained(2), SPARE], EVERYWHERE, WHOLE, 0.0)
    assert moves.vacate is None
    assert "fewer than 3" in moves.notes[A2]


def test_while_a_replica_is_missing_no_node_is_emptied():
    moves = repair().decide(
        [*drained(1), SPARE][1:], without(A0), {"broker-a": ReplicaGroupView(1, frozenset({1, 2}))}, 0.0
    )
    assert (moves.vacate, moves.hand_over) == (None, {})


def changing(in_sync: set[int], **members: frozenset[int]) -> dict[str, ReplicaGroupView]:
    now = ReplicaMembers(1, frozenset({0, 1, 2}), **members)
    return {"broker-a": ReplicaGroupView(0, frozenset(in_sync), now)}


def test_a_new_replica_replaces_a_replica_whose_node_is_lost():
    one, nodes = repair(), [*NODES[:2], SPARE]
    assert one.decide(nodes, without(A2), changing({0, 1}), 100.0).substitute is None
    moves = one.decide(nodes, without(A2), changing({0, 1}), 160.0)
    assert (moves.substitute, moves.start) == (A2, {})
    leaving = changing({0, 1}, leaving=frozenset({2}))
    moves = one.decide(nodes, without(A2), leaving, 170.0)
    assert (moves.substitute, moves.start) == (None, {}), "it is replaced already"
    back = Node("n9", "10.0.0.2", {"broker-a-2": 100})
    assert one.decide([*nodes, back], without(A2), leaving, 180.0).start == {A2: back}


def test_a_lost_replica_that_the_current_change_needs_starts_on_another_node():
    one, nodes = repair(), [*NODES[:2], SPARE]
    current = changing({0, 1}, leaving=frozenset({1}), added=frozenset({2}))
    one.decide(nodes, without(A2), current, 100.0)
    assert one.decide(nodes, without(A2), current, 160.0).start == {A2: SPARE}


def test_a_joining_replica_starts_at_once():
    joining = changing({0, 1}, joining=frozenset({2}))
    assert repair().decide([*NODES[:2], SPARE], without(A2), joining, 0.0).start == {A2: SPARE}


def test_new_replicas_replace_the_replicas_of_a_drained_node():
    for index, name in enumerate((A0, A1, A2)):
        moves = repair().decide([*drained(index), SPARE], EVERYWHERE, changing({0, 1, 2}), 0.0)
        assert (moves.substitute, moves.vacate, moves.hand_over) == (name, None, {})


def test_a_drained_node_waits_for_a_place_a_master_and_the_end_of_another_change():
    moves = repair().decide(drained(2), EVERYWHERE, changing({0, 1, 2}), 0.0)
    assert moves.substitute is None
    assert "different nodes" in moves.notes[A2]
    busy = changing({0, 1, 2}, leaving=frozenset({1}))
    assert "after the current change" in repair().decide([*drained(2), SPARE], EVERYWHERE, busy, 0.0).notes[A2]
    assert "a new replica replaces" in repair().decide([*drained(1), SPARE], EVERYWHERE, busy, 0.0).notes[A1]
    none = {"broker-a": replace(changing({0})["broker-a"], master=None)}
    assert "has a master" in repair().decide([*drained(2), SPARE], EVERYWHERE, none, 0.0).notes[A2]

"""Tests of a replica's role: leading, following, leases, and role orders that arrive too late."""

from __future__ import annotations

from itertools import product

import pytest

from actors.core.replica.orders import ReplicaRole
from actors.core.replica.role import TRANSITIONS, EpochAge, ReplicaRoleState, RoleOrder
from raymq.common.errors import InvalidArgumentError, NotMasterError


@pytest.fixture
def role():
    return ReplicaRoleState("broker-a", 1, epoch=3)


def test_a_replica_starts_fenced_and_takes_nothing(role):
    assert role.role is ReplicaRole.FENCED
    with pytest.raises(NotMasterError):
        role.check_append(None, 0.0)
    with pytest.raises(NotMasterError):
        role.check_chunk(3)


def test_leading_begins_a_newer_epoch_and_ends_with_the_lease(role):
    assert role.lead(4, lease_until_s=10.0)
    role.check_append(4, 9.9)
    role.check_append(None, 9.9)
    with pytest.raises(NotMasterError):
        role.check_append(4, 10.0)
    role.renew(4, 12.0)
    role.check_append(4, 11.9)


def test_a_lease_never_becomes_shorter_by_a_late_renewal(role):
    role.lead(4, 10.0)
    role.renew(4, 8.0)
    assert role.leads(9.0)


@pytest.mark.parametrize("epoch", [2, 3])
def test_a_replica_cannot_lead_an_epoch_that_it_has_seen(role, epoch):
    with pytest.raises(NotMasterError):
        role.lead(epoch, 10.0)


def test_an_order_to_lead_may_be_repeated(role):
    assert role.lead(4, 10.0)
    assert not role.lead(4, 11.0)
    assert role.leads(10.5)


def test_following_ends_leading_and_old_orders_change_nothing(role):
    role.lead(4, 10.0)
    assert role.follow(5, master=0)
    assert not role.follow(5, master=0)
    assert (role.role, role.master, role.epoch) == (ReplicaRole.SLAVE, 0, 5)
    for late in (lambda: role.lead(4, 20.0), lambda: role.renew(4, 20.0), lambda: role.follow(4, 2)):
        with pytest.raises(NotMasterError):
            late()
    role.check_chunk(5)
    with pytest.raises(NotMasterError):
        role.check_chunk(4)


def test_a_master_is_not_made_a_follower_in_its_own_epoch(role):
    role.lead(4, 10.0)
    with pytest.raises(NotMasterError):
        role.follow(4, 0)


def test_nobody_follows_itself(role):
    with pytest.raises(InvalidArgumentError, match="itself"):
        role.follow(4, 1)


def test_a_draining_master_takes_no_appends_but_serves_its_followers(role):
    role.lead(4, 10.0)
    role.drain(4)
    with pytest.raises(NotMasterError):
        role.check_append(4, 1.0)
    role.check_asked(4)
    role.lead(5, 10.0)
    role.check_append(5, 1.0)


def test_a_client_of_another_epoch_is_refused(role):
    role.lead(4, 10.0)
    for epoch in (3, 5):
        with pytest.raises(NotMasterError, match="epoch 4"):
            role.check_append(epoch, 1.0)


def in_role(role: ReplicaRole) -> ReplicaRoleState:
    """Return the state of replica 1 in the given role, in epoch 5."""
    one = ReplicaRoleState("broker-a", 1, epoch=5 if role is ReplicaRole.FENCED else 4)
    if role is ReplicaRole.MASTER:
        one.lead(5, 10.0)
    elif role is ReplicaRole.SLAVE:
        one.follow(5, master=0)
    return one


def carry_out(one: ReplicaRoleState, order: RoleOrder, epoch: int) -> None:
    if order is RoleOrder.LEAD:
        one.lead(epoch, 10.0)
    elif order is RoleOrder.RENEW:
        one.renew(epoch, 10.0)
    elif order is RoleOrder.FOLLOW:
        one.follow(epoch, master=0)
    else:
        one.drain(epoch)


@pytest.mark.parametrize(("before", "order", "age"), list(product(ReplicaRole, RoleOrder, EpochAge)))
def test_orders_follow_the_transition_table_and_others_are_refused(before, order, age):
    one, epoch = in_role(before), 5 + age.value
    after = TRANSITIONS[before].get((order, age))
    if after is None:
        with pytest.raises(NotMasterError, match="epoch 5"):
            carry_out(one, order, epoch)
        assert (one.role, one.epoch, one.draining) == (before, 5, False)
    else:
        carry_out(one, order, epoch)
        assert (one.role, one.epoch) == (after, epoch)
        assert one.master == (1 if after is ReplicaRole.MASTER else 0)


def test_the_table_refuses_every_order_of_an_older_epoch_and_makes_masters_in_newer_epochs_only():
    """An order to become master is accepted only in a newer epoch, and an order of an older epoch is refused. So no
    replaced master leads again, and no epoch has two masters."""
    for before, orders in TRANSITIONS.items():
        assert all(age is not EpochAge.OLDER for _, age in orders)
        made = [age for (_, age), after in orders.items() if after is ReplicaRole.MASTER is not before]
        assert all(age is EpochAge.NEWER for age in made)

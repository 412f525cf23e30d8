"""Decides if a user has the permissions that a request needs, in the order of ACL 2.0 (spec/features.md §8).

Super users have all permissions. For other users, each permission that the request needs is decided separately, and all
must be allowed. The closest matching custom entry decides. If no custom entry matches, the closest matching default
entry decides. If no entry matches, the permission is refused. Between equally close entries Deny wins, as RocketMQ's
documentation specifies; RocketMQ's code does the opposite. This module also refuses disabled users, although the check
of the signature does so too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from raymq.common.errors import AccessDeniedError
from raymq.remoting.access.policies import Action, Decision, Entry, Need, PolicyType, Resource, ResourceType
from raymq.remoting.access.state import AuthState
from raymq.remoting.access.users import User

VISIBLE = (Action.PUB, Action.SUB, Action.GET, Action.LIST)
"""The actions that make a topic's or group's name visible to a user."""


def decide(state: AuthState, user: User, address: str, needs: Iterable[Need]) -> None:
    """Raise AccessDeniedError unless `user`, at the client address `address`, has all permissions in `needs`. `address`
    is empty if it is unknown.

    The caller must already have authenticated the user by the request's signature (raymq.remoting.access.authenticate).
    """
    for need in needs:
        reason = _refusal(state, user, address, need)
        if reason:
            raise AccessDeniedError(user.name, str(need), reason)
    if not user.is_enabled:
        raise AccessDeniedError(user.name, "an enabled user", "the user is disabled")


def is_allowed(state: AuthState, user: User, address: str, need: Need) -> bool:
    """True if `decide` allows the user the permission `need`."""
    return not _refusal(state, user, address, need)


def visible(
    state: AuthState, user: User, address: str, to_resource: Callable[[str], Resource]
) -> Callable[[str], bool]:
    """Return a function that filters the names in a server's answer. It returns True for names that `user` may send to,
    consume, get or list.

    `to_resource` converts a name to its resource: `topic_resource` or `group_resource` of
    raymq.remoting.access.policies.
    """
    return lambda name: is_allowed(state, user, address, Need(VISIBLE, to_resource(name)))


def _refusal(state: AuthState, user: User, address: str, need: Need) -> str:
    """Return the reason why the permission `need` is refused; empty if it is allowed."""
    if not user.is_enabled:
        return "the user is disabled"
    if user.is_super:
        return ""
    if need.resource.type is ResourceType.SERVER:
        return "only super users and raymq's own actors have this permission"
    entries = state.policies.get(user.name, ())
    for policy_type in PolicyType:
        matching = [entry for entry in entries if entry.policy_type is policy_type and entry.matches(need, address)]
        if matching:
            best = max(matching, key=_rank)
            return "" if best.decision is Decision.ALLOW else f"the user's policy entry for {best.resource} denies it"
    return "no entry of the user's policies allows it"


def _rank(entry: Entry) -> tuple[tuple[bool, bool, int], bool]:
    return entry.resource.closeness, entry.decision is Decision.DENY

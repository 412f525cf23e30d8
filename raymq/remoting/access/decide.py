"""Decides if a user may do what a request needs, in the order of ACL 2.0 (spec/features.md §8).

Super users may do everything. For others, each need is decided on its own and all must be allowed: of the custom
entries that match, the one that describes the resource most closely decides; where none matches, so do the default
entries; where none of them does either, the answer is no. Between entries that are equally close, Deny wins: RocketMQ's
documentation says so, and its code does the opposite. A disabled user is refused here, too, not at its signature only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from raymq.common.errors import AccessDeniedError
from raymq.remoting.access.policies import Action, Decision, Entry, Need, PolicyType, Resource, ResourceType
from raymq.remoting.access.state import AuthState
from raymq.remoting.access.users import User

VISIBLE = (Action.PUB, Action.SUB, Action.GET, Action.LIST)
"""A user sees the names of topics and groups for which one of these actions is allowed."""


def decide(state: AuthState, user: User, address: str, needs: Iterable[Need]) -> None:
    """Return if `user` may do all of `needs` from `address` ("" where that is unknown), else raise AccessDeniedError.

    The user is one that the request's signature has shown (raymq.remoting.access.authenticate); without needs, any may.
    """
    for need in needs:
        reason = _refusal(state, user, address, need)
        if reason:
            raise AccessDeniedError(user.name, str(need), reason)
    if not user.is_enabled:
        raise AccessDeniedError(user.name, "an enabled user", "the user is disabled")


def is_allowed(state: AuthState, user: User, address: str, need: Need) -> bool:
    """True if `decide` would let this one need pass."""
    return not _refusal(state, user, address, need)


def visible(
    state: AuthState, user: User, address: str, to_resource: Callable[[str], Resource]
) -> Callable[[str], bool]:
    """A filter for the names in an answer: True for those that `user` may send to, consume, get or list.

    `to_resource` makes a name the resource that it counts as: `topic_resource` or `group_resource` of
    raymq.remoting.access.policies.
    """
    return lambda name: is_allowed(state, user, address, Need(VISIBLE, to_resource(name)))


def _refusal(state: AuthState, user: User, address: str, need: Need) -> str:
    """Why `need` is refused; "" if it is allowed."""
    if not user.is_enabled:
        return "the user is disabled"
    if user.is_super:
        return ""
    if need.resource.type is ResourceType.SERVER:
        return "only super users and raymq's own actors may"
    entries = state.policies.get(user.name, ())
    for policy_type in PolicyType:
        matching = [entry for entry in entries if entry.policy_type is policy_type and entry.matches(need, address)]
        if matching:
            best = max(matching, key=_rank)
            return "" if best.decision is Decision.ALLOW else f"its entry for {best.resource} denies it"
    return "no entry of its policies allows it"


def _rank(entry: Entry) -> tuple[tuple[bool, bool, int], bool]:
    return entry.resource.closeness, entry.decision is Decision.DENY

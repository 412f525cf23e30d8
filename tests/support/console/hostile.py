"""A FakeCluster for tests of the console in which every text is an attack on the page that shows the text."""

from __future__ import annotations

from dataclasses import replace

from raymq.client.admin.dead_letters import DeadLetter
from raymq.client.admin.delayed import DelayedMessage
from raymq.client.admin.track import MessageTrack, TrackState
from raymq.common.message import MessageExt
from raymq.common.protocol.clients import ProducerConnection
from raymq.common.protocol.group import GroupConfig
from raymq.common.protocol.status import Problem
from raymq.tools.console.cluster import AuditEntry
from tests.support.console.fake_cluster import FakeCluster, fake_message, members_of

XSS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'-alert(1)-'",
    "<svg onload=alert(1)>",
    "javascript:alert(1)",
    "{{7*7}}${7*7}<%= 7*7 %>",
    "</textarea></title></style><script>alert(1)</script>",
    '<a hx-get="/logout" hx-trigger="load">x</a>',
    '<b data-copy=x hx-on:click="alert(1)">',
    "<iframe srcdoc='<script>parent.alert(1)</script>'>",
    "&lt;script&gt;",
    "\u202egnp.exe\x1b[2J\x00\ufeff",
)
"""Attack texts. If a page does not escape them, they take effect as markup, attributes, scripts, addresses or
templates."""
ALL_XSS = " ".join(XSS)
XSS_BODY = " ".join(XSS[:-1]).encode()
"""A message body of attack texts without control characters, so that the console shows the body as text."""
NAME = '"><img src=x onerror=alert(1)>%|{{7*7}}'
"""An attack text that stands in a page's path in place of the name of a topic, group or client. A cluster does not
allow such names, but a page must be safe without this check."""
FOREIGN = "img, iframe, script:not([src]), style, [onerror], [onload], [hx-get*=logout], [hx-on\\:click]"
"""CSS selector of elements and attributes that no page of the console contains, unless an attack text has taken
effect."""


def hostile_message(offset: int = 0) -> MessageExt:
    """Return a message in which every text is an attack."""
    return fake_message(
        NAME,
        XSS_BODY,
        queue_offset=offset,
        tags=ALL_XSS,
        keys=XSS,
        properties={text: text for text in XSS},
        message_id=XSS[1],
    )


class HostileCluster(FakeCluster):
    """A fake cluster with an attack text (for example, a script) in each text that the console shows: topics, groups,
    messages, clients, errors and changes."""

    def __init__(self) -> None:
        super().__init__()
        self.topics = {"orders": self.topics["orders"], NAME: self.topics["orders"]}
        self.groups = {NAME: self.groups["billing"]}
        self.members = {NAME: [replace(one, client_id=ALL_XSS, host=ALL_XSS) for one in members_of(NAME, "PUSH", 3)]}
        self.readers = {NAME: (NAME,)}
        self.last_error = ALL_XSS
        self.configs = {NAME: GroupConfig(NAME)}
        self.messages = {NAME: [hostile_message(offset) for offset in range(3)]}
        self.letters = {NAME: [DeadLetter(hostile_message(), ALL_XSS, False)]}
        self.delayed_messages = [DelayedMessage(NAME, 0, 0, hostile_message())]
        self.producers = [ProducerConnection(ALL_XSS, ALL_XSS, 1, ALL_XSS, 0.0)]
        self.problems = (Problem("masters", "fail", ALL_XSS, ALL_XSS, ALL_XSS),)
        self.audit_entries = [AuditEntry(0, ALL_XSS, ALL_XSS, ALL_XSS, ALL_XSS, {ALL_XSS: ALL_XSS}, ALL_XSS)]

    def message_track(self, message: MessageExt) -> list[MessageTrack]:
        return [MessageTrack(NAME, TrackState.DEAD, 3, ALL_XSS)]

"""What each failure of an attempt says."""

from __future__ import annotations

import pytest

from raymq.errors import (
    ClientStateError,
    DataLossError,
    MessageIllegalError,
    NotMasterError,
    RequestTimeoutError,
    ServiceNotAvailableError,
    StoreError,
    StoreFailedError,
    StoreLockedError,
    StoreNotWritableError,
    SystemBusyError,
)
from raymq.producer.retry_policy import another_broker_helps, given_up, may_be_stored


@pytest.mark.parametrize(
    ("error", "stored", "elsewhere"),
    [
        (MessageIllegalError("too long"), False, False),
        (ClientStateError("fenced"), False, False),
        (SystemBusyError("full"), False, True),
        (NotMasterError("a", 3), False, True),
        (StoreNotWritableError("disk full"), False, True),
        (StoreLockedError("/x", "1"), False, True),
        (StoreFailedError("disk failed"), True, True),
        (ServiceNotAvailableError("dead"), True, True),
        (RequestTimeoutError("append", 1.0), True, True),
        (StoreError("something"), True, True),
        (DataLossError("gone"), True, False),
    ],
)
def test_what_a_failure_says(error, stored, elsewhere):
    assert may_be_stored(error) is stored
    assert another_broker_helps(error) is elsewhere


def test_what_was_never_stored_is_said_to_be_not_stored():
    busy = given_up(SystemBusyError("full"), 3.0)
    assert type(busy) is SystemBusyError
    assert "nothing of this one was stored" in str(busy)
    assert type(given_up(RequestTimeoutError("describe", 1.0), 3.0)) is ServiceNotAvailableError

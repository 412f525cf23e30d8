"""Tests of a producer's retry policy, for each error that a send attempt can raise."""

from __future__ import annotations

import pytest

from raymq.client.producer.senders.retry_policy import another_broker_helps, given_up, may_be_stored
from raymq.common.errors import (
    AccessDeniedError,
    AuthenticationError,
    ClientStateError,
    DataLossError,
    InSyncReplicasError,
    MessageIllegalError,
    NotMasterError,
    QuotaExceededError,
    RequestTimeoutError,
    ServiceNotAvailableError,
    StoreError,
    StoreFailedError,
    StoreLockedError,
    StoreNotWritableError,
    SystemBusyError,
)


@pytest.mark.parametrize(
    ("error", "stored", "another_broker"),
    [
        (MessageIllegalError("too long"), False, False),
        (ClientStateError("fenced"), False, False),
        (SystemBusyError("full"), False, True),
        (QuotaExceededError("alice", "bytes", 250), False, True),
        (AccessDeniedError("alice", "Pub on Topic:orders", "no entry"), False, False),
        (AuthenticationError("no user"), False, False),
        (NotMasterError("a", 3), False, True),
        (InSyncReplicasError("a", 1, 2), False, True),
        (StoreNotWritableError("disk full"), False, True),
        (StoreLockedError("/x", "1"), False, True),
        (StoreFailedError("disk failed"), True, True),
        (ServiceNotAvailableError("dead"), True, True),
        (RequestTimeoutError("append", 1.0), True, True),
        (StoreError("something"), True, True),
        (DataLossError("gone"), True, False),
    ],
)
def test_an_error_decides_whether_a_batch_may_be_stored_and_moved(error, stored, another_broker):
    assert may_be_stored(error) is stored
    assert another_broker_helps(error) is another_broker


def test_the_error_after_the_timeout_states_that_nothing_is_stored():
    busy = given_up(SystemBusyError("full"), 3.0)
    assert type(busy) is SystemBusyError
    assert "and is not stored" in str(busy)
    assert type(given_up(RequestTimeoutError("describe", 1.0), 3.0)) is ServiceNotAvailableError
    few = given_up(InSyncReplicasError("a", 1, 2), 3.0)
    assert "is not stored (last failure: broker group 'a' has 1 replica(s) in sync" in str(few)

"""Tests of the end of a push-consumer instance in a Pull actor whose main thread has finished."""

from __future__ import annotations

import pytest

from actors.pull.push_instance import PushInstance
from actors.pull.services import PullServices
from raymq.client.consumer.push.settings import PushSettings
from raymq.client.consumer.subscription import Subscription
from tests.support.clients.fakes import WAIT_S, main_thread_has_finished


@pytest.fixture
def services():
    services = PullServices([], "here", "127.0.0.1", 1)
    yield services
    services.close()


def test_an_instance_ends_after_the_main_thread_has_finished(services):
    instance = PushInstance("pull-billing-0", "key", PushSettings("billing", (Subscription.parse("orders"),)), services)
    with main_thread_has_finished():
        instance.stop()
        instance.turn()
        assert instance.ended.wait(WAIT_S)

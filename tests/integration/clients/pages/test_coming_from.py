"""Tests of the documentation pages for users of Kafka, Celery or ray.util.queue: each program prints the output that
its page shows."""

from __future__ import annotations

import pytest

import raymq
from tests.support.clusters.page_example import assert_prints_what_it_says


@pytest.mark.parametrize("page", ["coming-from-kafka.md", "coming-from-celery.md"])
def test_the_program_of_the_page_prints_the_documented_output(mq: raymq.Client, page: str) -> None:
    assert_prints_what_it_says(page)


@pytest.mark.parametrize("index", [0, 1])
def test_each_program_of_the_page_on_rays_queue_prints_the_documented_output(mq: raymq.Client, index: int) -> None:
    assert_prints_what_it_says("coming-from-ray-queue.md", index)

"""Counts the renewals of a simple consumer with `auto_renew`, so that tests wait for renewals and not for times."""

from __future__ import annotations

import raymq


def renewals_of(consumer: raymq.SimpleConsumer) -> list[list[bool]]:
    """Return a list that grows with each answered renewal of `consumer`: which of its leases were extended."""
    renewer = consumer._engine._renewer
    assert renewer is not None
    renewals: list[list[bool]] = []
    extend = renewer._extend

    def extend_and_note(*arguments: object) -> list[bool]:
        results = extend(*arguments)  # type: ignore[arg-type]  # passed on as they came
        renewals.append(results)
        return results

    renewer._extend = extend_and_note
    return renewals

"""A task queue for Ray Serve on raymq: the adapter that `@task_consumer` deployments need, without Redis, RabbitMQ or
Celery.

    from raymq.serve import RaymqAdapterConfig, RaymqTaskProcessorAdapter

    TaskProcessorConfig(
        queue_name="images", adapter=RaymqTaskProcessorAdapter, adapter_config=RaymqAdapterConfig(), max_retries=3
    )

The package needs the extra `serve` (``pip install "raymq[serve]"``). Its names are imported when they are first used
(PEP 562), so that importing the package imports neither Ray Serve nor Ray. docs/ray-serve.md has a complete example.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from raymq.common.extras import require_extra

if TYPE_CHECKING:  # These imports are only for type checkers, which do not run the module's `__getattr__`.
    from raymq.serve.adapter import RaymqTaskProcessorAdapter as RaymqTaskProcessorAdapter
    from raymq.serve.config import RaymqAdapterConfig as RaymqAdapterConfig
    from raymq.serve.lag_policy import RaymqLagPolicy as RaymqLagPolicy

_HOMES: Final = {
    "RaymqAdapterConfig": "raymq.serve.config",
    "RaymqLagPolicy": "raymq.serve.lag_policy",
    "RaymqTaskProcessorAdapter": "raymq.serve.adapter",
}
"""For each public name of the package `raymq.serve`: the module that defines this name."""

__all__ = ["RaymqAdapterConfig", "RaymqLagPolicy", "RaymqTaskProcessorAdapter"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'raymq.serve' has no attribute {name!r}")
    require_extra("serve", "raymq.serve")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)

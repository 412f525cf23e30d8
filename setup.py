"""The packages of the wheel, found, with the lower floors in a folder of `raymq`; all else is in pyproject.toml.

`storage`, `actors` and `placement` are names that other distributions and users have, too, and pip lets one
distribution overwrite another's files. So the wheel has them in `raymq/_floors/`, which
raymq.client.cluster.server_path puts on the import path of server processes. A rule of pyproject.toml can either find
packages or rename them, not both.
"""

from setuptools import find_packages, setup

INSTALLED_AT_THE_TOP = ("raymq", "raydp_jobs")
LOWER_FLOORS = ("storage", "actors", "placement")


def found(*tops: str) -> list[str]:
    """These packages with all their sub-packages."""
    return find_packages(include=[pattern for top in tops for pattern in (top, f"{top}.*")])


setup(
    packages=[*found(*INSTALLED_AT_THE_TOP), *(f"raymq._floors.{name}" for name in found(*LOWER_FLOORS))],
    package_dir={f"raymq._floors.{floor}": floor for floor in LOWER_FLOORS},
)

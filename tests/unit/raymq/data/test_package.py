"""Tests of the package raymq.data without Ray Data. The package imports Ray Data only when it is used, and an error
names Ray Data if it is missing."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import raymq.data


def test_neither_raymq_nor_its_data_loads_ray_before_it_is_used() -> None:
    program = "import sys, raymq, raymq.data; print(dir(raymq.data) and sorted({'ray', 'pyarrow'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_all_names_resolve() -> None:
    assert sorted(raymq.data.__all__) == dir(raymq.data) == sorted(raymq.data._HOMES)
    for name in raymq.data.__all__:
        assert getattr(raymq.data, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'read_kafka'"):
        _ = raymq.data.read_kafka


def test_without_the_extra_the_error_has_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.util import find_spec

    def none_of_fsspec(name: str) -> Any:
        return None if name == "fsspec" else find_spec(name)

    for name in raymq.data.__all__:
        monkeypatch.delattr(raymq.data, name, raising=False)
    monkeypatch.setattr("raymq.common.extras.find_spec", none_of_fsspec)
    with pytest.raises(ImportError, match=r"needs fsspec, which is not installed: pip install 'raymq\[data\]'"):
        _ = raymq.data.read_topic

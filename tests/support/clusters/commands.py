"""Runs `raymq` commands in the test's own process, which saves the second that a new process needs to connect to Ray.

A command runs here from `main` on, as in its own process: with its arguments, standard streams and exit code. It uses
the test's connection to Ray. So at least one test of each command family still starts a process. The commands that
connect to Ray themselves (`raymq status`, `raymq doctor`, `raymq job`) always need a process, because they disconnect
from Ray at their end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest
from click.testing import CliRunner

from raymq.tools.cli.entry import main
from raymq.tools.cli.terminal.output import out


def run_here(
    *arguments: str, stdin: str = "", directory: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run one `raymq` command in this process. Returns its exit code and its output, like `subprocess.run` with
    text=True.

    `stdin`: the standard input. `directory`: the current directory of the command, by default the present one.
    `environment`: environment variables to set. Raises any exception that the command does not handle.
    """
    isolated = CliRunner(env=environment).isolation(stdin)
    with pytest.MonkeyPatch.context() as patch, chdir(directory or os.curdir), isolated as (stdout, stderr, _):
        patch.setattr(sys, "argv", ["raymq", *arguments])
        # Restore the console's width and file afterwards. The command sets both.
        patch.setattr(out, "_width", None)
        patch.setattr(out, "_file", None)
        with pytest.raises(SystemExit) as ended:
            main()
        sys.stdout.flush()
        sys.stderr.flush()
        return subprocess.CompletedProcess(
            ["raymq", *arguments], int(ended.value.code or 0), stdout.getvalue().decode(), stderr.getvalue().decode()
        )

"""The way from a command to the exit code of its process, for `raymq` and for every job with a `main` of its own.

Exit codes: 0 done, 1 refused or failed (one line on standard error says why and what to do), 2 wrong usage, 130
interrupted.
"""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from raymq.common.errors import RaymqError
from raymq.tools.cli.terminal.output import out, say_error


def run_command(command: click.Command) -> NoReturn:
    """Run a command with the process's arguments and end the process with the command's exit code."""
    if not sys.stdout.isatty():
        out.width = 200  # a file has no width, and a folded cell is hard to search for
    try:
        code = command.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except RaymqError as error:
        say_error(str(error))
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort):
        say_error("interrupted")
        sys.exit(130)
    finally:
        sys.stdout = sys.stderr  # Ray may print until the process has ended
    sys.exit(code if isinstance(code, int) else 0)

"""Make the files of a release and try them: `make release`. Nothing is published.

1. The version is the same in pyproject.toml, raymq/__init__.py and the newest section of CHANGELOG.md.
2. `twine check` accepts the source distribution and the wheel.
3. In a fresh environment without extras the command `raymq` runs, and `raymq demo` names its extra.
4. With the extra `demo`, the demo's figures are right.
5. The folder dist/ gets the two files. Files of earlier builds of raymq are removed from it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import raymq
from tests.support.clusters.wheels import build_raymq

ROOT: Final = Path(__file__).parents[1]
_STEP_S: Final = 900.0


def newest_section(changelog: str) -> str:
    """Return the title of the first section of a changelog, without a day: "0.2.0" or "Unreleased". Returns an empty
    text if the changelog has no section."""
    found = re.search(r"^## (\S+)", changelog, re.MULTILINE)
    return found[1] if found else ""


def version_problems(project: str, package: str, changelog: str) -> list[str]:
    """Compare the versions of pyproject.toml, of the package and of the changelog. Returns one text per difference."""
    problems = []
    if package != project:
        problems.append(f"raymq/__init__.py has version {package}, pyproject.toml has {project}: set both")
    section = newest_section(changelog)
    if section != project:
        problems.append(f'the newest section of CHANGELOG.md is "{section}": name it "{project}", with the day')
    return problems


def run(command: Sequence[str | Path], cwd: Path, *, fails: bool = False) -> str:
    """Run a step of the release without PYTHONPATH, print its output and return it.

    `fails`: the step must end with exit code 1, else with 0. Raises SystemExit if it ends otherwise.
    """
    print("$", *command, flush=True)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_STEP_S,
        check=False,
    )
    print(done.stdout, flush=True)
    if done.returncode != int(fails):
        raise SystemExit(f"the release is not good: {' '.join(map(str, command))} ended with {done.returncode}")
    return done.stdout


def try_wheel(wheel: Path, directory: Path) -> None:
    """Install a wheel in a fresh environment in `directory` and run its command and its demo. Raises SystemExit if a
    step fails."""
    venv.create(directory / "venv", with_pip=True)
    programs = directory / "venv" / "bin"
    pip = [programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, wheel], directory)
    run([programs / "raymq", "--version"], directory)
    refusal = run([programs / "raymq", "demo"], directory, fails=True)
    if "pip install 'raymq[demo]'" not in refusal:
        raise SystemExit("the release is not good: without its extra, `raymq demo` does not name the extra")
    run([*pip, f"{wheel}[demo]"], directory)
    run([programs / "raymq", "demo"], directory)


def replace_files(files: Sequence[Path], folder: Path) -> list[Path]:
    """Copy the files of a release into a folder, and remove files of earlier builds of raymq from the folder. So
    `twine upload dist/*` uploads one release. Returns the paths of the copies."""
    folder.mkdir(exist_ok=True)
    for earlier in folder.glob("raymq-*"):
        earlier.unlink()
    return [Path(shutil.copy(file, folder)) for file in files]


def main() -> int:
    """Build the files of a release, try them, and put them into dist/. Returns 0, or 1 if the versions differ.

    Raises SystemExit if a step fails. Then dist/ is unchanged.
    """
    version: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    problems = version_problems(version, raymq.__version__, (ROOT / "CHANGELOG.md").read_text())
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="raymq-release-") as directory:
        built = build_raymq(Path(directory))
        run([sys.executable, "-m", "twine", "check", "--strict", *built], ROOT)
        fresh = Path(directory) / "fresh"
        fresh.mkdir()
        try_wheel(built[1], fresh)
        files = replace_files(built, ROOT / "dist")
    print(f"raymq {version} is good:", *[file.relative_to(ROOT) for file in files])
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Tests of `make release`: the versions that must agree, and a step that fails."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

import raymq
from tests.release import newest_section, replace_files, run, version_problems

ROOT = Path(__file__).parents[3]
CHANGELOG = "# Changelog\n\nText\n\n## 0.2.0 (2026-11-26)\n\n### New\n\n## 0.1.0\n"


def test_equal_versions_are_no_problem() -> None:
    assert version_problems("0.2.0", "0.2.0", CHANGELOG) == []


@pytest.mark.parametrize(
    ("project", "package", "changelog", "problem"),
    [
        ("0.2.0", "0.1.0", CHANGELOG, "raymq/__init__.py has version 0.1.0"),
        ("0.3.0", "0.3.0", CHANGELOG, 'the newest section of CHANGELOG.md is "0.2.0": name it "0.3.0"'),
        ("0.2.0", "0.2.0", CHANGELOG.replace("## 0.2.0 (2026-11-26)", "## Unreleased"), '"Unreleased"'),
        ("0.2.0", "0.2.0", "", 'is ""'),
    ],
)
def test_a_difference_is_named(project: str, package: str, changelog: str, problem: str) -> None:
    [text] = version_problems(project, package, changelog)
    assert problem in text


def test_the_package_has_the_version_of_the_project_and_the_changelog_has_a_section_for_it() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert raymq.__version__ == version
    after_unreleased = changelog.partition("## Unreleased")[2] or changelog
    assert newest_section(after_unreleased) == version


def test_every_image_tag_has_the_version() -> None:
    """Images are named in manifests, in the Dockerfile, in help texts and in docs/kubernetes.md."""
    folders = ("k8s", "docs", "raymq/tools")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix != ".pyc"]
    tags = {
        (str(path.relative_to(ROOT)), tag)
        for path in files
        if path.is_file()
        for tag in re.findall(r"\braymq:(\d+\.\d+\.\d+)", path.read_text(errors="ignore"))
    }
    assert {"k8s/raymq.yaml", "k8s/Dockerfile", "docs/kubernetes.md"} <= {path for path, _ in tags}
    assert {tag for _, tag in tags} == {raymq.__version__}, sorted(tags)


def test_the_folder_of_the_release_has_only_the_files_of_this_release(tmp_path: Path) -> None:
    built = [tmp_path / "raymq-0.2.0.tar.gz", tmp_path / "raymq-0.2.0-py3-none-any.whl"]
    for file in built:
        file.write_text("new")
    dist = tmp_path / "dist"
    dist.mkdir()
    (dist / "raymq-0.1.0-py3-none-any.whl").write_text("old")
    (dist / built[0].name).write_text("old")
    (dist / "notes.txt").write_text("not of raymq")
    assert replace_files(built, dist) == [dist / file.name for file in built]
    assert {path.name: path.read_text() for path in dist.iterdir()} == {
        "notes.txt": "not of raymq",
        **{file.name: "new" for file in built},
    }


def test_a_step_with_another_exit_code_than_expected_ends_the_release(tmp_path: Path) -> None:
    assert run([sys.executable, "-c", "print('well')"], tmp_path) == "well\n"
    assert run([sys.executable, "-c", "raise SystemExit(1)"], tmp_path, fails=True) == ""
    with pytest.raises(SystemExit, match="ended with 3"):
        run([sys.executable, "-c", "raise SystemExit(3)"], tmp_path)
    with pytest.raises(SystemExit, match="ended with 0"):
        run([sys.executable, "-c", ""], tmp_path, fails=True)

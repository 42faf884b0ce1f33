"""The release: what wheel and sdist hold, that they run from an empty folder, and what extras bring."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import limits
import pytest

from burst_mcore.version import __version__

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
BUILD = "from setuptools import build_meta as b; b.build_{}({!r})"
NEEDED = (
    "burst_mcore/py.typed", "burst_plan/py.typed", "burst_bench/py.typed",
    "burst_plan/step/errors.json", "burst_plan/step/model/presets.json",
    "burst_plan/step/model/families.json", "burst_plan/patches/README.md",
)  # fmt: skip


def _built(kind, source, into):
    """The file that setuptools builds of a tree, as pip makes it: nothing is downloaded."""
    done = limits.run([sys.executable, "-c", BUILD.format(kind, str(into))], cwd=source)
    assert done.returncode == 0, done.stderr
    (found,) = into.iterdir()
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, sdist, the wheel that is built of the sdist), of a copy of what git has."""
    folder = tmp_path_factory.mktemp("release")
    tree, whole = folder / "tree", folder / "of_the_sdist"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, files.stdout.split("\0")):
        to = tree / name
        to.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            to.symlink_to(os.readlink(ROOT / name))
        elif (ROOT / name).exists():
            to.write_bytes((ROOT / name).read_bytes())
    for name in ("wheel", "sdist", "again"):
        (folder / name).mkdir()
    wheel, sdist = (_built(kind, tree, folder / kind) for kind in ("wheel", "sdist"))
    with tarfile.open(sdist) as archive:
        archive.extractall(whole, filter="data")
    return wheel, sdist, _built("wheel", whole / sdist.name.removesuffix(".tar.gz"), folder / "again")


def test_wheel_and_sdist_hold_the_packages_and_no_tests(built):
    wheel, sdist, again = built
    assert wheel.name == f"burst_mcore-{__version__}-py3-none-any.whl" and again.name == wheel.name
    with zipfile.ZipFile(wheel) as archive, zipfile.ZipFile(again) as other:
        names, metadata = archive.namelist(), archive.read(f"burst_mcore-{__version__}.dist-info/METADATA")
        assert sorted(names) == sorted(other.namelist())
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"burst_mcore", "burst_plan", "burst_bench", f"burst_mcore-{__version__}.dist-info"}
    assert {*NEEDED} <= {*names}
    patches = {name for name in names if name.endswith(".patch")}
    assert patches == {f"burst_plan/{path.relative_to(ROOT)}" for path in (ROOT / "patches").rglob("*.patch")}
    assert b"License-Expression: Apache-2.0" in metadata and b"Requires-Python: >=3.11" in metadata
    with tarfile.open(sdist) as archive:
        there = {name.partition("/")[2] for name in archive.getnames()}
    assert {*NEEDED, "LICENSE", "README.md", "pyproject.toml"} <= there


def test_the_wheel_runs_from_an_empty_folder(built, tmp_path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, built[0]]
    done = limits.run([sys.executable, *pip])
    assert done.returncode == 0, done.stderr

    def run(*words):
        return limits.run([sys.executable, *words], cwd=empty, env={**os.environ, "PYTHONPATH": str(site)})

    code = "import burst_mcore, burst_plan, burst_bench; print(burst_mcore.__file__, burst_bench.__file__)"
    done = run("-c", code)
    assert done.stdout.count(str(site)) == 2, done.stderr
    done = run(site / "bin" / "burst-mcore", "draw", "--help")
    assert done.returncode == 0 and "Usage" in done.stdout, done.stderr
    done = run("-m", "burst_mcore.torch")
    assert done.returncode and done.stderr.startswith("usage: python -m burst_mcore.torch SCRIPT"), (
        done.stderr
    )


def test_no_extra_brings_deepspeed_but_its_own():
    """Pictures and tables need no training framework."""

    def brought(extra):
        for line in EXTRAS[extra]:
            inner = re.match(r"burst-mcore\[(.*?)\]", line)
            yield from (each for name in inner[1].split(",") for each in brought(name)) if inner else [line]

    with_deepspeed = {extra for extra in EXTRAS if any("deepspeed" in line for line in brought(extra))}
    assert with_deepspeed == {"deepspeed"}


def test_every_place_that_has_the_version_has_this_one():
    assert f"\n## {__version__} (" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()

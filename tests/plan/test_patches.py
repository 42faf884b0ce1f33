"""Source patches on copies of Megatron: applied, reverted, refused; and trained with, without the launcher.

Other versions' trees are tried where BURST_MEGATRON_TREES names them, separated by colons.
"""

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("typer")

import versions
from typer.testing import CliRunner
from versions import BURST, CP2, INSTALLED, MODEL, losses, start, whole_copy, write_data

from burst_plan.cli import app
from burst_plan.patch import insertions, trees
from burst_plan.patch.trees import BACKEND, OPTIONS

PATCHES = Path(__file__).parents[2] / "patches"
HAS_TRAINING = (INSTALLED / "megatron" / "training").is_dir()
NAMES = [BACKEND, *([OPTIONS] if HAS_TRAINING else [])]
OTHERS = [Path(tree) for tree in os.environ.get("BURST_MEGATRON_TREES", "").split(":") if tree]


@pytest.fixture
def tree(tmp_path):
    return copy(INSTALLED, tmp_path / "tree")


def copy(source, target):
    """The files of Megatron that patches touch, and what says the version."""
    names = {i.file for i in insertions.parse(trees.patch_text(OPTIONS))} | {"megatron/core/package_info.py"}
    for name in names:
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, target / name)
    return target


def contents(tree):
    return {
        path.relative_to(tree): path.read_bytes() for path in sorted(tree.rglob("*.py")) if path.is_file()
    }


def run(*arguments):
    result = CliRunner().invoke(app, ["patch", *map(str, arguments)])
    return result.exit_code, result.output


def options(name):
    return ["--options"] if name == OPTIONS else []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("source", [INSTALLED, *OTHERS], ids=str)
def test_applied_twice_and_reverted_a_tree_is_as_it_was(source, name, tmp_path):
    tree = copy(source, tmp_path)
    before = contents(tree)
    code, said = run("--check", tree, *options(name))
    assert code == 0 and re.search(rf"megatron-core 0\.\d+\.\d+.*: {name}.patch fits$", said.strip()), said
    assert contents(tree) == before
    assert run("--apply", tree, *options(name))[0] == 0
    patched = contents(tree)
    assert run("--check", tree, *options(name))[1].strip().endswith(f"{name}.patch is there")
    assert run("--apply", tree, *options(name))[1].strip().endswith("is there already")
    assert contents(tree) == patched != before
    for source_text in patched.values():
        ast.parse(source_text)
    assert run("--revert", tree)[1].strip().endswith("lines taken out")
    assert contents(tree) == before
    assert run("--revert", tree)[1].strip().endswith("it has no line of ours")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("source", [INSTALLED, *OTHERS], ids=str)
def test_what_is_printed_is_what_git_applies(source, name, tmp_path):
    by_git, by_us = copy(source, tmp_path / "git"), copy(source, tmp_path / "us")
    code, printed = run("--print", by_git, *options(name))
    assert code == 0
    if "0.19.2" in str(trees.SourceTree(by_git).version):  # whose numbers of lines the patches have
        assert trees.SourceTree(by_git).numbered(name) == trees.patch_text(name)
    subprocess.run(["git", "apply", "--unidiff-zero", "-"], input=printed, text=True, cwd=by_git, check=True)
    run("--apply", by_us), run("--apply", by_us, *options(name))
    assert contents(by_git) == contents(by_us)
    code, said = run("--print", by_us, *options(name))
    assert code == 2 and "is patched" in said


def test_patches_hold_lines_of_ours_alone():
    files = [*PATCHES.glob("megatron-core/*.patch"), *PATCHES.glob("upstream/*.patch")]
    assert {path.stem for path in files} >= {BACKEND, OPTIONS}
    for path in files:
        header, body = path.read_text().split("\ndiff --git ", 1)
        for words in ("Why: ", "Touches: ", "Can go: "):
            assert words in header, (path, words)
        for line in body.splitlines()[1:]:
            assert line.startswith(("+", "@@ ", "diff --git ", "--- ", "new file mode", "index ")), line


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


ATTENTION = "megatron/core/transformer/attention.py"
OURS = "submodules = with_burst_attention(submodules)"
WRONG = {
    "no Megatron": (lambda tree: shutil.rmtree(tree / "megatron"), "is no tree of Megatron"),
    "an older version": (
        lambda tree: edit(tree / "megatron/core/package_info.py", "MINOR = 1", "MINOR = 0#"),
        "the patches support 0.16.1 to 0.20",
    ),
    "another call": (
        lambda tree: edit(tree / ATTENTION, "config=tmp_config,", "config=tmp_config, more=1,"),
        "is not as in any version that is known",
    ),
    "no such call": (
        lambda tree: edit(tree / ATTENTION, "self.core_attention = ", "self.core = "),
        "expected one statement 'self.core_attention =' in Attention.__init__, got 0",
    ),
    "no such file": (lambda tree: (tree / ATTENTION).unlink(), f"has no {ATTENTION}"),
    "no Python": (lambda tree: edit(tree / ATTENTION, "self.core_attention = ", "="), "no Python source"),
    "lines of another hand": (
        lambda tree: edit(tree / ATTENTION, "import copy", "import copy, burst_mcore"),
        "has a line that no patch put there",
    ),
    "lines of ours that were edited": (
        lambda tree: (run("--apply", tree), edit(tree / ATTENTION, OURS, "pass  # burst_mcore")),
        "has a line that no patch put there",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_tree_that_is_not_known_is_refused_in_one_line(kind, tree):
    spoil, words = WRONG[kind]
    spoil(tree)
    before = contents(tree)
    for way in ("--check", "--apply", "--revert" if "edited" in kind else "--print"):
        code, said = run(way, tree)
        assert code == 2 and words in said and said.count("\n") == 1, said
        assert contents(tree) == before


# ---- training without the launcher ----


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """Whole copies of the installed Megatron, by the patch that they have."""
    copies = {}

    def of(name):
        if name not in copies:
            copies[name] = whole_copy(INSTALLED, tmp_path_factory.mktemp("patched"))
            trees.SourceTree(copies[name]).apply(name)
        return copies[name]

    return of


needs_training = pytest.mark.skipif(not HAS_TRAINING, reason="this wheel has no megatron.training")


@pytest.fixture(scope="module")
def alone(patched, data, tmp_path_factory):
    """One process with Megatron's own attention, in a patched copy."""
    return losses(start(patched(BACKEND), tmp_path_factory.mktemp("alone"), 1, [*MODEL, *data]))


@pytest.mark.proves("patched Megatron without the launcher", "CP 2")
@needs_training
def test_a_patched_copy_trains_a_ring_of_two_as_one_process(patched, data, alone, tmp_path):
    ring = start(patched(BACKEND), tmp_path, 2, [*MODEL, *data, *CP2, *BURST])
    assert losses(ring) == pytest.approx(alone, rel=1e-4)


@pytest.mark.proves(
    "patched Megatron without the launcher", "striped, fused loss, segment recompute", versions=("0.19.2",)
)
@needs_training
def test_with_all_options(patched, data, alone, tmp_path):
    ring = start(patched(OPTIONS), tmp_path, 2, [*MODEL, *data, *CP2, *BURST, *versions.OPTIONS])
    assert losses(ring) == pytest.approx(alone, rel=1e-4)
    assert versions.in_effect(ring) == [versions.IN_EFFECT[OPTIONS]] * 2

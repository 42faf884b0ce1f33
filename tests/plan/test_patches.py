"""Source patches on copies of Megatron: applied, reverted, refused; and trained with, without the launcher.

Other versions' trees are tried where BURST_MEGATRON_TREES names them, separated by colons.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

import versions
from typer.testing import CliRunner
from versions import BURST, CP2, INSTALLED, MLA, MODEL, losses, start, whole_copy, write_data

from burst_plan.cli import app
from burst_plan.patch import insertions, trees
from burst_plan.patch.trees import BACKEND, OPTIONS

BEFORE = re.compile(r"^[A-Z]\d{4} \d\d:|CPU support is on")
"""Lines of torch's log, and that of CPU support, which every run has."""
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
    subprocess.run(["git", "apply", "--unidiff-zero", "-"], input=printed, text=True, cwd=by_git, check=True)
    run("--apply", by_us, *options(name))
    assert contents(by_git) == contents(by_us)
    code, said = run("--print", by_us, *options(name))
    assert code == 2 and "is patched" in said


@pytest.mark.skipif(not HAS_TRAINING, reason="this wheel has no megatron.training")
def test_the_larger_patch_holds_the_smaller_one_and_is_applied_on_top_of_it(tree):
    small, large = (insertions.parse(trees.patch_text(name)) for name in (BACKEND, OPTIONS))
    assert large[: len(small)] == small
    once = copy(tree, tree.parent / "once")
    run("--apply", tree), run("--apply", tree, "--options")
    run("--apply", once, "--options")
    assert contents(tree) == contents(once)


def test_patches_hold_lines_of_ours_alone():
    files = [*PATCHES.glob("megatron-core/*.patch"), *PATCHES.glob("upstream/*.patch")]
    assert {path.stem for path in files} >= {BACKEND, OPTIONS}
    for path in files:
        header, body = path.read_text().split("\ndiff --git ", 1)
        for words in ("Why: ", "Touches: ", "Can go: "):
            assert words in header, (path, words)
        for line in body.splitlines()[1:]:
            assert line.startswith(("+", "@@ ", "diff --git ", "--- ", "new file mode", "index ")), line


@pytest.mark.skipif(
    "0.19.2" not in str(trees.SourceTree(INSTALLED).version), reason="the numbers are 0.19.2's"
)
@pytest.mark.parametrize("name", [BACKEND, OPTIONS])
def test_the_numbers_in_the_patches_are_those_of_0_19_2(name):
    assert trees.SourceTree(INSTALLED).numbered(name) == trees.patch_text(name)


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


ATTENTION = "megatron/core/transformer/attention.py"
WRONG = {
    "no Megatron": (lambda tree: shutil.rmtree(tree / "megatron"), "is no tree of Megatron"),
    "an older version": (
        lambda tree: edit(tree / "megatron/core/package_info.py", "MINOR = 1", "MINOR = 0#"),
        "the patches serve 0.16.1 to 0.20",
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
}


@pytest.mark.parametrize("way", ["--check", "--apply", "--print"])
@pytest.mark.parametrize("kind", WRONG)
def test_a_tree_that_is_not_known_is_refused_in_one_line(kind, way, tree):
    spoil, words = WRONG[kind]
    spoil(tree)
    before = contents(tree)
    code, said = run(way, tree)
    assert code == 2 and words in said and said.count("\n") == 1, said
    assert contents(tree) == before


def test_lines_that_were_edited_are_not_taken_for_ours(tree):
    run("--apply", tree)
    edit(tree / ATTENTION, "submodules = with_burst_attention(submodules)", "pass  # burst_mcore")
    for way in ("--check", "--apply", "--revert"):
        code, said = run(way, tree)
        assert code == 2 and "has a line that no patch put there" in said


def test_one_thing_must_be_asked_for(tree):
    for words in ([], ["--check", tree, "--apply", tree]):
        code, said = run(*words)
        assert code == 2 and "give one of --check" in said
    code, said = run("--apply", "--options", tree)
    assert code == 2 and f"DIR must follow its option at once: --apply {tree} --options" in said


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


@pytest.mark.proves("patched Megatron without the launcher", "MLA, MoE")
@needs_training
@pytest.mark.slow
def test_latent_attention_and_experts(patched, data, tmp_path):
    for name, words in (
        ("mla", MLA),
        ("moe", ["--num-experts", "2", "--moe-router-topk", "1", "--moe-router-pre-softmax"]),
    ):
        model = [word for word in MODEL if name != "mla" or word != "--group-query-attention"]
        if name == "mla":
            index = model.index("--num-query-groups")
            del model[index : index + 2]
        ring = start(patched(BACKEND), tmp_path / name, 2, [*model, *data, *words, *CP2, *BURST])
        one = start(patched(BACKEND), tmp_path / f"{name}1", 1, [*model, *data, *words, *BURST])
        assert losses(ring) == pytest.approx(losses(one), rel=1e-4)


@needs_training
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_launcher_runs_in_a_patched_copy_too(name, patched, data, alone, tmp_path):
    arguments = [*MODEL, *data, *CP2, *BURST, "--burst-fused-loss", "--burst-recompute", "attention"]
    ring = start(patched(name), tmp_path, 2, arguments, by_launcher=True)
    assert losses(ring) == pytest.approx(alone, rel=1e-4)


HYBRID = (
    "--hybrid-layer-pattern *-*E/*- --num-experts 2 --moe-router-topk 1 --moe-router-pre-softmax "
    "--mtp-num-layers 1"
).split()


@pytest.mark.proves("patched Megatron without the launcher", "HybridModel with experts and MTP")
@needs_training
@pytest.mark.slow
def test_a_hybrid_model_without_transformer_engine(patched, data, tmp_path):
    """With the options its stack is of local modules, as by the launcher; by the flag alone it is refused."""
    model = [*MODEL[2:], *data, *HYBRID, *BURST]  # without --num-layers
    one, ring, by_launcher = (
        start(patched(OPTIONS), tmp_path / str(i), n, [*model, *size], launched)
        for i, (n, size, launched) in enumerate([(1, [], False), (2, CP2, False), (2, CP2, True)])
    )
    assert losses(ring) == losses(by_launcher)
    # The first step alone: Megatron weighs the further heads of a rank by the rank's own count of tokens.
    assert losses(ring)[0] == pytest.approx(losses(one)[0], rel=1e-4)
    code, _, errors = start(patched(BACKEND), tmp_path / "refused", 1, model)
    assert code == 1 and "burst_hybrid_stack_spec, or use the patch with --options" in errors


TOWER = """
import copy, torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
torch.distributed.init_process_group("gloo")
parallel_state.initialize_model_parallel(context_parallel_size=2)
tensor_parallel.model_parallel_cuda_manual_seed(1)
language = TransformerConfig(
    num_layers=1, hidden_size=32, num_attention_heads=2, context_parallel_size=2, attention_dropout=0.0,
    hidden_dropout=0.0, use_cpu_initialization=True, context_parallel_attention_backend="burst",
)
images, found = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(1)), []
for backend in ("burst", "default"):
    vision = copy.deepcopy(language)
    vision.context_parallel_size, vision.context_parallel_attention_backend = 1, backend
    torch.manual_seed(1)
    size = {"img_h": 28, "img_w": 28, "patch_dim": 14}
    norms = {"ln_pre_impl": WrappedTorchNorm, "ln_post_impl": None}
    tower = CLIPViTModel(vision, get_vit_layer_with_local_spec(), **norms, **size)
    found.append(tower(images))
    print("core attention:", type(tower.decoder.layers[0].self_attention.core_attention).__name__)
torch.testing.assert_close(*found)
"""


@pytest.mark.slow
def test_a_vision_tower_at_cp_1_beside_a_language_model_at_cp_2(patched, tmp_path):
    """The tower's configuration is a copy of the language model's, with another size."""
    (tmp_path / "tower.py").write_text(TOWER)
    code, printed, errors = start(patched(BACKEND), tmp_path, 2, [], script=tmp_path / "tower.py")
    assert code == 0, errors[-3000:]
    assert re.findall(r"core attention: (\w+)", printed) == ["BurstCoreAttention", "DotProductAttention"] * 2


REFUSED = {
    "dropout": ([*BURST, "--attention-dropout", "0.1"], "attention dropout 0.1"),
    "masks": ([*BURST, "--reset-attention-mask"], "--reset-attention-mask"),
    "an option alone": (["--burst-ring", "flat"], "--burst-ring has no effect"),
    "yaml": ([*BURST, "--yaml-cfg", "no.yaml"], "--yaml-cfg replaces the command line"),
}


@needs_training
@pytest.mark.slow
@pytest.mark.parametrize("kind", REFUSED)
def test_with_all_options_refusals_are_one_line_and_exit_status_2(kind, patched, data, tmp_path):
    words, said = REFUSED[kind]
    code, _, errors = start(patched(OPTIONS), tmp_path, 1, [*MODEL, *data, *words])
    lines = [line for line in errors.splitlines() if not BEFORE.search(line)]
    assert code == 2 and len(lines) == 1 and said in lines[0], errors[-3000:]


@needs_training
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dropout", "masks"])
def test_with_the_flag_alone_refusals_come_with_the_model(kind, patched, data, tmp_path):
    words, said = REFUSED[kind]
    code, _, errors = start(patched(BACKEND), tmp_path, 1, [*MODEL, *data, *words])
    assert code == 1 and said in errors.strip().splitlines()[-1], errors[-3000:]


@needs_training
@pytest.mark.slow
def test_without_burst_mcore_the_parser_is_as_ever(patched):
    code = (
        "import importlib.util, sys\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, *more: None if n == 'burst_mcore' else real(n, *more)\n"
        "from megatron.training.arguments import parse_args\n"
        "sys.argv = ['x', '--micro-batch-size', '1']\n"
        "arguments = parse_args()\n"
        "assert not hasattr(arguments, 'burst_layout')\n"
        "assert not [name for name in sys.modules if name.startswith('burst_mcore')]\n"
        "print(arguments.context_parallel_attention_backend)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(patched(OPTIONS))},
    )  # fmt: skip
    assert done.stdout.strip().endswith("default"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("source", [tree for tree in OTHERS if (tree / "pretrain_gpt.py").is_file()], ids=str)
def test_a_checkout_trains_by_the_launcher_and_by_the_patches(source, tmp_path):
    rows = versions.compared(source, tmp_path)
    assert len(rows) in (3, 10) and all(row["equal"] for row in rows), rows


REGISTERING = """
from burst_mcore.megatron.core_attention import BurstCoreAttention
from megatron.core.transformer.core_attention_registry import register_core_attention
register_core_attention("burst", BurstCoreAttention)
"""


@needs_training
@pytest.mark.slow
@pytest.mark.skipif(
    "0.19.2" not in str(trees.SourceTree(INSTALLED).version), reason="the numbers are 0.19.2's"
)
def test_the_proposed_registry_trains_a_ring_of_two(data, alone, tmp_path, monkeypatch):
    tree = whole_copy(INSTALLED, tmp_path / "tree")
    proposal = (PATCHES / "upstream" / "register_core_attention.patch").read_text()
    subprocess.run(["git", "apply", "--unidiff-zero", "-"], input=proposal, text=True, cwd=tree, check=True)
    monkeypatch.setattr(
        versions, "SCRIPT", versions.SCRIPT.replace("sys.argv += cpu", REGISTERING + "sys.argv += cpu")
    )
    assert losses(start(tree, tmp_path, 2, [*MODEL, *data, *CP2, *BURST])) == pytest.approx(alone, rel=1e-4)

"""bench step: training steps under each framework, ours beside theirs, and the paper's ablation."""

import warnings
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
from ranks import processes, torchrun

pytest.importorskip("typer")

from typer.testing import CliRunner

from burst_bench.core import METHODS, Table, World
from burst_bench.methods import steps
from burst_bench.methods.steps import OURS
from burst_bench.methods.steps_megatron import OWN
from burst_bench.results import read
from burst_bench.run import cases_for, run
from burst_bench.subjects import SUBJECTS
from burst_bench.subjects.step import FRAMEWORKS, StepCase
from burst_plan.cli import app

SMALL = StepCase(framework="megatron", ranks=2, nodes=2, seq=64, heads=4, kv_heads=2, head_dim=8, layers=1)
TE = {"te p2p", "te all_gather", "te a2a", "te a2a+p2p"}


def _ran(case, methods=()):
    results = run(StepCase, {"small": case}, [*methods], 1, "cpu")
    assert results.errors == [], results.errors
    return results, results.tables["small"]


def test_a_step_of_megatron_with_ours_and_its_own_has_one_loss():
    pytest.importorskip("megatron.core")
    methods = ["megatron (CP 1)", "burst auto", "+ attention", "te p2p"]
    results, table = _ran(SMALL, methods)
    losses = table.column("first loss")
    assert set(losses) == set(methods[:3])
    assert max(samples[0] for samples in table.column("loss error").values()) <= 1e-5
    assert results.refused == [
        {"case": "small", "method": "te p2p", "reason": "needs a GPU and the package transformer-engine"}
    ]
    for method in methods[:3]:
        assert min(table[method, m][0] for m in ("cpu", "wall", "written", "peak", "tokens/s", "MFU")) > 0
    wall, own = table["burst auto", "wall"][0], table["megatron (CP 1)", "wall"][0]
    assert table["burst auto", "tokens/s"][0] == pytest.approx(64 / wall)
    assert table["megatron (CP 1)", "tokens/s"][0] == pytest.approx(128 / own)
    assert table["burst auto", "wall / megatron"][0] == pytest.approx(2 * wall / own)


THEIRS = ["torch-ring", "torch-gather", "torch-ulysses"]


def _gradients(rank, size, name):
    """Gradients of a step, whole, and those of one process."""
    warnings.simplefilter("error", FutureWarning)  # of torch, for what is to go
    case = replace(SMALL, framework="fsdp")
    train = METHODS["fsdp", name].build(case, World(rank, size))
    train()
    (model, *_), want = train.args, steps.llama(case)
    want(input_ids=case.sample, labels=case.sample).loss.backward()
    pairs = zip(model.parameters(), want.parameters(), strict=True)
    return [float((p.grad.full_tensor() - w.grad).norm() / w.grad.norm()) for p, w in pairs]


@pytest.mark.parametrize("name", [*THEIRS, "+ fused loss"])
def test_a_step_of_fsdp2_has_the_gradients_of_one_process(name):
    pytest.importorskip("transformers")
    for errors in processes(2, _gradients, name):
        assert len(errors) == 12 and max(errors) < 1e-5


def test_a_step_of_fsdp2_with_ours_and_what_torch_has_has_one_loss():
    pytest.importorskip("transformers")
    ours = "burst auto with fused loss"
    methods = [*THEIRS, ours]
    results, table = _ran(replace(SMALL, framework="fsdp"), methods)
    assert results.refused == [] and set(table.column("first loss")) == set(methods)
    assert max(samples[0] for samples in table.column("loss error").values()) <= 1e-6
    fastest = min(table[name, "wall"][0] for name in THEIRS)
    assert table[ours, "wall / torch"][0] == pytest.approx(table[ours, "wall"][0] / fastest)
    needs = METHODS["fsdp", "torch-ulysses"].needs
    assert needs(replace(SMALL, ranks=4), "cpu") == "heads and K/V heads that are multiples of 4, got 4 and 2"


PACKAGES = {"fsdp": "transformers"}


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_method_of_a_framework_passes_the_gate(framework):
    pytest.importorskip(PACKAGES.get(framework, framework))
    results, table = _ran(replace(SMALL, framework=framework, ranks=4))
    lacking = {entry["method"] for entry in results.refused}
    theirs = {"megatron": TE, "deepspeed": {"ulysses (DistributedAttention)"}, "fsdp": {"torch-ulysses"}}
    assert lacking == theirs[framework]
    assert OURS.keys() <= table.column("wall").keys()


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_torchrun_starts_the_ranks(framework, tmp_path):
    pytest.importorskip(PACKAGES.get(framework, framework))
    out = tmp_path / "step.json"
    shape = "heads=4; kv_heads=2; head_dim=8; layers=1"
    cases = [f"ranks=2; seq={seq}; {shape}" for seq in (32, 64)]
    bench = f"-m burst_bench step --framework {framework} --device cpu --repeats 1".split()
    named = [word for case in cases for word in ("--case", case)]
    done = torchrun(2, *bench, *named, "--methods", "burst ring,+ query", "--out", out, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "share each sequence" not in done.stderr  # said by each method of ours
    results = read(out)
    assert results.errors == [], done.stderr
    assert [*results.cases] == cases
    for case in cases:
        assert set(results.tables[case].column("tokens/s")) == {"burst ring", "+ query"}
    assert done.stdout.count("all figures:") == 1


def test_megatrons_own_attention_is_left_out_where_its_scores_do_not_fit():
    pytest.importorskip("megatron")
    own = METHODS["megatron", OWN]
    assert own.needs(SMALL, "cpu") is None
    assert "GB for scores of whole sequences" in own.needs(replace(SMALL, seq=2**20), "cpu")
    assert own.needs(replace(SMALL, seq=2**20), "cuda") is None


def test_the_ablation_changes_one_thing_at_a_time():
    rows = [{**asdict(OURS[name].config), **vars(OURS[name])} for name in [*OURS][4:]]
    first = {"backward": "kv", "ring": "flat", "fused": False, "recompute": "full"}
    assert first.items() <= rows[0].items()
    changed = [
        [name for name in before if name != "config" and before[name] != after[name]]
        for before, after in pairwise(rows)
    ]
    assert changed == [["backward"], ["ring"], ["fused"], ["recompute"], ["recompute"]]


def test_flops_are_those_of_the_papers_formula():
    """12 s L h^2 (2 + 0.5 s/h + 1.5 ffn/h + V/(2 L h)), for as many K/V heads as heads."""
    case = StepCase(heads=8, kv_heads=8, head_dim=32, layers=3, seq=1024)
    s, layers, h = 1024, 3, 256
    ffn, vocabulary = steps.WIDER * h, steps.VOCABULARY
    paper = 12 * s * layers * h**2 * (2 + 0.5 * s / h + 1.5 * ffn / h + vocabulary / (2 * layers * h))
    assert case.flops == pytest.approx(paper)


def test_flops_are_those_of_the_models_matrices():
    pytest.importorskip("transformers")
    case = replace(SMALL, seq=32)
    parameters = steps.llama(case).named_parameters()
    matrices = sum(p.numel() for name, p in parameters if p.dim() == 2 and "embed_tokens" not in name)
    attention = 6 * case.layers * case.seq**2 * case.heads * case.head_dim
    assert case.flops == 6 * case.seq * matrices + attention


def test_mfu_is_of_what_the_ranks_can_do():
    table = Table({("burst ring", "wall"): [2.0, 4.0], ("product", "wall"): [0.5]})
    found = {(method, meter): samples for method, meter, samples in SMALL.derive(table)}
    peak = 2 * 512**3 / 0.5
    want = SMALL.flops / 2 / 2.0 / peak
    assert found["burst ring", "MFU"] == pytest.approx([want, want / 2])
    table["device", "FLOP/s"] = [1e12]
    del table["product", "wall"]
    found = {(method, meter): samples for method, meter, samples in SMALL.derive(table)}
    assert found["burst ring", "MFU"][0] == pytest.approx(SMALL.flops / 2 / 2.0 / 1e12)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--framework", "jax"], "framework must be one of deepspeed, fsdp, megatron, got 'jax'"),
        (["--cluster", "2x4"], "unrecognized arguments: --cluster 2x4"),
        (["--case", "ranks=4; nodes=3"], "ranks must be a multiple of nodes, 3, got 4"),
        (["--case", "seq=100; ranks=8"], "seq must be a multiple of 2 x ranks, 16"),
        (["--case", "heads=6; kv_heads=4"], "heads must be a multiple of kv_heads, 4, got 6"),
        (["--case", "dtype=int8"], "dtype must be one of"),
        (["--methods", "te p2p", "--framework", "deepspeed"], "unknown method 'te p2p'; legal: ulysses"),
        (["--methods", "te p2p", "--framework", "megatron"], "a GPU and the package transformer-engine"),
        (["--case", "ranks=2; seq=64", "--methods", "+ double ring"], "needs 2 nodes or more: nodes=2"),
    ],
)  # fmt: skip
def test_bad_options_are_one_line_and_leave_nothing_behind(words, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["bench", "step", *words])
    assert done.exit_code == 2 and error in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and not list(tmp_path.iterdir())


def test_a_subject_that_starts_its_own_processes_refuses_torchrun(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, ["bench", "topology"])
    assert done.exit_code == 2 and "topology starts its own processes: run it without torchrun" in done.stderr


def test_ranks_on_gpus_are_started_by_torchrun(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("burst_bench.run.torch.cuda.is_available", lambda: True)
    done = CliRunner().invoke(app, ["bench", "step", "--device", "cuda"])
    assert done.exit_code == 2 and "torchrun --nproc-per-node 8 -m burst_bench step" in done.stderr


@pytest.mark.parametrize(
    ("ranks", "text"), [(16, "nodes=8; seq=512"), (2, "seq=100"), (2, "ranks=2; seq=100")]
)
def test_a_case_under_torchrun_is_of_the_ranks_that_it_started(ranks, text):
    assert cases_for(SUBJECTS["step"], [text], "cpu", ranks)[text].ranks == ranks

"""bench step: training steps under each framework, ours beside theirs, and the paper's ablation."""

import warnings
from dataclasses import replace

import pytest
from ranks import processes

pytest.importorskip("typer")


from burst_bench.core import METHODS, Table, World
from burst_bench.methods import steps
from burst_bench.methods.steps import OURS
from burst_bench.run import cases_for, run
from burst_bench.subjects import SUBJECTS
from burst_bench.subjects.step import FRAMEWORKS, StepCase

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
    ("ranks", "text"), [(16, "nodes=8; seq=512"), (2, "seq=100"), (2, "ranks=2; seq=100")]
)
def test_a_case_under_torchrun_is_of_the_ranks_that_it_started(ranks, text):
    assert cases_for(SUBJECTS["step"], [text], "cpu", ranks)[text].ranks == ranks

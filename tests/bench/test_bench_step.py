"""bench step: training steps under each framework, ours beside theirs, and the paper's ablation."""

from dataclasses import replace

import pytest

pytest.importorskip("typer")


from burst_bench.core import METHODS
from burst_bench.methods.steps import OURS
from burst_bench.run import run
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

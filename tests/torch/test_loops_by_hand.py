"""Loops by hand over FSDP2 and DDP: losses, norms and weights of three clipped steps are one process's."""

import json
import math
from pathlib import Path

import finetune_fsdp
import pytest
import torch
from causal_lms import model_of, worst
from loops import CLIP, RATE, Case, by_hand, one_process, samples, whole_weights
from ranks import on_ranks, processes, torchrun
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel

from burst_mcore.torch import UnsupportedError, parallelize

PAIR = {"dp": 1, "cp": 2}


def _each(rank, size, cases):
    return [by_hand(rank, size, case) for case in cases]


def _held(ranks, *cases):
    for found in zip(*processes(ranks, _each, cases), strict=True):
        case = cases[0]
        cases = cases[1:]
        losses, norms, weights = one_process(case)
        for mine in found:
            assert mine[0] == pytest.approx(losses, rel=2e-6), case
            assert mine[1] == pytest.approx(norms, rel=1e-5), case
            assert worst(mine[2], weights) < 1e-6, case


def test_two_ranks():
    """FSDP2 with casts, accumulation, recompute; DDP with documents, and the model's own loss; CP 1."""
    striped = {"checkpointing": "segment", "config": {"layout": "striped"}}
    _held(
        2,
        Case(PAIR, casts=True, accumulated=2, options=striped),
        Case(PAIR, "ddp", packed=True, accumulated=2, options={"loss": "model"}),
        Case({"dp": 2, "cp": 1}, packed=True, accumulated=2, options={"checkpointing": "full"}),
    )


def test_four_ranks():
    """HSDP; and tensor parallelism within, whose ranks share the vocabulary."""
    _held(
        4,
        Case({"dp_replicate": 2, "dp_shard": 1, "cp": 2}, accumulated=2),
        Case({"cp": 2, "tp": 2}, packed=True),
    )


LOOPS = (
    {"packed": True, "accumulated": 2},
    {"compiled": True},
    {"lora": True, "accumulated": 2},
    {"lora": True, "packed": True, "options": {"checkpointing": "full"}},
    {"options": {"checkpointing": "attention", "loss": "model"}},
)
"""What a loop may do under any wrapper, on any mesh."""
OF_ONE_MESH = (
    {"compiled": True, "options": {"checkpointing": "segment"}},
    {"packed": True, "model": {"kind": "Gemma2", "sliding_window": 8}},
    {"model": {"kind": "Qwen3"}, "options": {"config": {"layout": "contiguous"}}},
)
SUMS = ({"sums": True, "accumulated": 2}, {"sums": True, "options": {"loss": "model"}})
HSDP = {"dp_replicate": 2, "dp_shard": 1, "cp": 2}
MORE = {
    "FSDP2": (PAIR, "fsdp", (*LOOPS, *OF_ONE_MESH)),
    "FSDP2 adds gradients": (PAIR, "fsdp", SUMS),
    "DDP": (PAIR, "ddp", (*LOOPS, *OF_ONE_MESH)),
    "DP x CP": ({"dp": 2, "cp": 2}, "fsdp", LOOPS[:1]),
    "CP x DP": ({"cp": 2, "dp": 2}, "fsdp", LOOPS[:1]),
    "DP x CP under DDP": ({"dp": 2, "cp": 2}, "ddp", LOOPS[:1]),
    "HSDP": (HSDP, "fsdp", (*LOOPS, {"casts": True, "options": {"checkpointing": "segment"}})),
    "HSDP over CP": ({"dp_replicate": 2, "cp": 2}, "fsdp", LOOPS),
    "CP x TP": ({"cp": 2, "tp": 2}, "fsdp", (*LOOPS[1:3], LOOPS[4], {"plan": "transformers"})),
    "DP x CP x TP": ({"dp": 1, "cp": 2, "tp": 2}, "fsdp", LOOPS[1:3]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_other_meshes_and_whatever_a_loop_does(name):
    mesh, wrapper, loops = MORE[name]
    _held(math.prod(mesh.values()), *(Case(mesh, wrapper, **options) for options in loops))


def _under_fsdp_1(rank, size, original, reduction="mean"):
    """As `by_hand`, under FullyShardedDataParallel; a CPU is no accelerator to it unless it is named."""
    mesh, case = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",)), Case({"cp": size})
    model = model_of()
    cp = parallelize(model, mesh, reduction=reduction)
    engine = FullyShardedDataParallel(
        model, device_mesh=mesh, use_orig_params=original, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.SGD(engine.parameters(), lr=RATE)
    losses, norms = [], []
    for batch in samples(case):
        loss = engine(**cp.shard(batch)).loss
        loss.backward()
        losses.append(loss.item())
        norms.append(engine.clip_grad_norm_(CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    want, want_norms, weights = one_process(case)
    assert losses == pytest.approx(want, rel=2e-6) and norms == pytest.approx(want_norms, rel=1e-5)
    with FullyShardedDataParallel.summon_full_params(engine):
        assert worst(whole_weights(model), weights) < 1e-6


@pytest.mark.parametrize("original", [True, False])
def test_fsdp_1_whose_means_are_said(original):
    processes(2, _under_fsdp_1, original)


@pytest.mark.parametrize("original", [True, False])
@on_ranks(2)
def test_fsdp_1_is_refused_without_a_word(rank, size, original):
    with pytest.raises(UnsupportedError, match="FSDP 1 does not say over which ranks|nothing reduces"):
        _under_fsdp_1(rank, size, original, reduction="auto")


@pytest.mark.slow
def test_the_example_trains_and_goes_on_after_a_save_that_was_cut_short(tmp_path):
    """Over CP 2 its losses are those of one process; a checkpoint without .metadata is not one."""
    (tmp_path / "text").write_text("\n".join(f"{i} times {i} is {i * i}." for i in range(400)))
    words = ["--data", tmp_path / "text", "--tokens", "127", "--save-every", "2"]

    def run(folder, ranks, *more):
        script = Path(finetune_fsdp.__file__)
        done = torchrun(ranks, script, *words, "--out", tmp_path / folder, "--cp", ranks, *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        rows = [json.loads(row) for row in (tmp_path / folder / "metrics.jsonl").read_text().splitlines()]
        return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]

    want = run("one", 1, "--steps", "3")
    rows = run("two", 2, "--steps", "3")
    saved = tmp_path / "two" / "checkpoint"
    assert sorted(folder.name for folder in saved.iterdir()) == ["step_2", "step_3"]
    (saved / "step_3" / ".metadata").unlink()
    rows += run("two", 2, "--steps", "3")[3:]
    for found, theirs in zip(rows, [*want, want[-1]], strict=True):
        assert found == pytest.approx(theirs, rel=1e-4)

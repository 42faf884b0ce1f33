"""Loops by hand over FSDP2 and DDP: losses, norms and weights of three clipped steps are one process's."""

import json
from pathlib import Path

import finetune_fsdp
import pytest
import torch
import torch.distributed.checkpoint as dcp
from causal_lms import model_of, worst
from loops import CLIP, RATE, Case, by_hand, one_process, samples, whole_weights
from ranks import processes, torchrun
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from burst_mcore.torch import RefusedError, parallelize

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
    _held(
        2,
        Case(
            PAIR,
            casts=True,
            accumulated=2,
            options={"checkpointing": "segment", "config": {"layout": "striped"}},
        ),
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


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
def test_whatever_a_loop_does(wrapper):
    _held(
        2,
        *(
            Case(PAIR, wrapper, **options)
            for options in (
                {"packed": True, "accumulated": 2},
                {"compiled": True},
                {"lora": True, "accumulated": 2},
                {"lora": True, "packed": True, "options": {"checkpointing": "full"}},
                {"options": {"checkpointing": "attention", "loss": "model"}},
                {"compiled": True, "options": {"checkpointing": "segment"}},
                {"packed": True, "model": {"kind": "Gemma2", "sliding_window": 8}},
                {"model": {"kind": "Qwen3"}, "options": {"config": {"layout": "contiguous"}}},
            )
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"dp": 2, "cp": 2}, {"cp": 2, "dp": 2}, {"dp_shard": 2, "cp": 2}])
def test_dims_in_any_order(mesh):
    _held(4, Case(mesh, accumulated=2), Case(mesh, "ddp", packed=True))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"dp_replicate": 2, "dp_shard": 1, "cp": 2}, {"dp_replicate": 2, "cp": 2}])
def test_replicas_of_shards(mesh):
    """HSDP; labels are as uneven as everywhere here, lengths are primes."""
    _held(
        4,
        *(
            Case(mesh, **options)
            for options in (
                {"packed": True, "accumulated": 2},
                {"casts": True, "options": {"checkpointing": "segment", "config": {"layout": "striped"}}},
                {"compiled": True},
                {"lora": True, "accumulated": 2},
                {"lora": True, "packed": True, "options": {"checkpointing": "full"}},
                {"options": {"checkpointing": "attention", "loss": "model"}},
            )
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"cp": 2, "tp": 2}, {"dp": 1, "cp": 2, "tp": 2}])
def test_tensor_parallelism_within(mesh):
    _held(
        4,
        *(
            Case(mesh, **options)
            for options in (
                {"accumulated": 2, "options": {"checkpointing": "segment"}},
                {"options": {"loss": "model"}},
                {"compiled": True},
                {"plan": "transformers"},
                {"lora": True, "packed": True},
            )
        ),
    )


@pytest.mark.slow
def test_gradients_that_fsdp_adds():
    _held(2, Case(PAIR, sums=True, accumulated=2), Case(PAIR, sums=True, options={"loss": "model"}))


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
    with FullyShardedDataParallel.summon_full_params(engine):
        return losses, norms, whole_weights(model)


@pytest.mark.parametrize("original", [True, False])
def test_fsdp_1_whose_means_are_said(original):
    losses, norms, weights = one_process(Case({"cp": 2}))
    for mine in processes(2, _under_fsdp_1, original):
        assert mine[0] == pytest.approx(losses, rel=2e-6)
        assert mine[1] == pytest.approx(norms, rel=1e-5)
        assert worst(mine[2], weights) < 1e-6


def _refused_under_fsdp_1(rank, size, original):
    with pytest.raises(RefusedError, match="FSDP 1 does not say over which ranks|nothing reduces"):
        _under_fsdp_1(rank, size, original, reduction="auto")


@pytest.mark.parametrize("original", [True, False])
def test_fsdp_1_is_refused_without_a_word(original):
    processes(2, _refused_under_fsdp_1, original)


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


@pytest.mark.parametrize("ranks", [None, "2"])
def test_the_example_says_in_a_line_which_cp_divides(ranks, monkeypatch, capsys):
    if ranks is None:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("WORLD_SIZE", ranks)
    with pytest.raises(SystemExit):
        finetune_fsdp.arguments_of(["--cp", "3", "--processes", "4"])
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith(f"error: --cp must divide the number of ranks, {ranks or 4}, got 3")


def _step(model, optimizer, batch):
    model(**batch, use_cache=False).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()


def _with_momentum(model):
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


def _resumed(rank, size, folder, number):
    """Load the checkpoint of the step before, if there is one, make a step over cp = size, and save."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    model = model_of()
    cp = parallelize(model, mesh)
    fully_shard(model, mesh=mesh)
    optimizer = _with_momentum(model)
    if number:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{number - 1}")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    _step(model, optimizer, cp.shard(samples(Case({"cp": size}))[number]))
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{number}")
    return whole_weights(model)


@pytest.mark.slow
def test_a_checkpoint_of_another_cp(tmp_path):
    for number, ranks in enumerate((2, 4, 2)):
        found = processes(ranks, _resumed, str(tmp_path), number)
    model = model_of()
    optimizer = _with_momentum(model)
    for batch in samples(Case({"cp": 1})):
        _step(model, optimizer, batch)
    want = {name: p.detach() for name, p in model.named_parameters()}
    assert all(worst(weights, want) < 1e-6 for weights in found)

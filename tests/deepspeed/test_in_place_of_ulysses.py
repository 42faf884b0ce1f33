"""Accelerate and callers of DistributedAttention, over burst: against one process."""

import copy
import importlib
import inspect

import deepspeed
import pytest
import torch
import torch.distributed as dist
from dense import dense, problem
from engines import SMALL, dataset, model_of, plain_loss, quiet, worst
from ranks import processes
from test_trainer import forget, parallelism

import burst_mcore.deepspeed as burst
from burst_mcore import Mask, shard, unshard
from burst_mcore.transformers.data.batches import collated
from burst_mcore.transformers.errors import RefusedError

skip_first_batches = pytest.importorskip("accelerate").skip_first_batches
"""As a script has it that imports it before burst takes its place."""
GAS, BATCHES = 3, 8
"""Micro-batches a step, and in all; the last step has fewer."""


def _config(stage):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": GAS,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, **SMALL},
        "zero_allow_untested_optimizer": True,
        "burst_attention": {"layout": "striped"},
    }


def _truth(data, groups):
    """(losses of micro-batches, norms, parameters, losses of the evaluation) of one process.

    Micro-batch i of group g is sample i D + g, and a step ends at the end of the data as well.
    """
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    for first in range(0, BATCHES, GAS):
        optimizer.zero_grad()
        step = range(first, min(first + GAS, BATCHES))
        found = [[plain_loss(model, data[i * groups + g]) for g in range(groups)] for i in step]
        (sum(x for row in found for x in row) / (GAS * groups)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        losses += [[x.item() for x in row] for row in found]
    with torch.no_grad():
        evaluated = [plain_loss(model, sample).item() for sample in data[:5]]
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}, evaluated


def _accelerate(rank, size, sp, stages):
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DeepSpeedPlugin

    quiet()
    burst.replace_ulysses()
    found = {}
    data = dataset(BATCHES * size // sp)
    for stage in stages:
        model = model_of()
        PartialState(cpu=True)  # as the Trainer does, so that Accelerate counts processes without a GPU
        plugin = DeepSpeedPlugin(hf_ds_config=_config(stage))
        accelerator = Accelerator(
            deepspeed_plugin=plugin,
            parallelism_config=parallelism(sp),
            gradient_accumulation_steps=GAS,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loaders = [
            torch.utils.data.DataLoader(rows, collate_fn=collated, batch_size=1) for rows in (data, data[:5])
        ]
        evaluated = accelerator.prepare(loaders[1])  # before its model is there
        model, optimizer, loader = accelerator.prepare(model, optimizer, loaders[0])
        model.eval()
        kept, other, third = map(iter, (evaluated, *accelerator.prepare(*loaders[1:] * 2)))
        for open_one in (kept, other, third):  # one is open in training, and two end as they began
            next(open_one)
        other.close()
        third.close()
        model.train()
        losses, norms = [], []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                losses.append(loss.item())
                if accelerator.sync_gradients:
                    norms.append(float(model.get_global_grad_norm()))
                optimizer.step()
                optimizer.zero_grad()
        kept.close()
        last = batch["input_ids"]
        model.eval()
        seen, labels, names = [], [], []
        with torch.no_grad():
            for batch in evaluated:
                seen += accelerator.gather_for_metrics(model(**batch).loss[None]).tolist()
                padded = accelerator.pad_across_processes({"labels": batch["labels"]}, dim=1, pad_index=-100)
                labels += accelerator.gather_for_metrics(padded)["labels"].unbind()
                names += accelerator.gather_for_metrics([str(len(labels))])
            alone = model(**collated(data[rank : rank + 1])).loss.item()  # a whole batch, of this rank
        whole = [a[: len(b["labels"])].equal(b["labels"]) for a, b in zip(labels, data[:5], strict=True)]
        assert all(whole) and len(names) == 5, "every sequence once and whole, in order"
        model.train()
        batches = iter(loader)
        next(batches)
        model.eval()  # within a loop of training, over a loader that was not prepared
        own = accelerator.gather_for_metrics(torch.tensor([float(rank)])).tolist()
        assert own == [float(r) for r in range(size)]
        model.train()
        mine = torch.utils.data.DataLoader(data[rank : rank + 1], collate_fn=collated)
        by_turns = burst.BurstSPDataLoaderAdapter(mine, rank % sp, loader.group, sp, "cpu")
        with torch.no_grad():  # what no Accelerator prepared: each rank's own, one after the other
            turns = [model(**part).loss.item() for _ in range(2) for part in by_turns][: sp + 1]
            model.eval()
            ended = model(**next(iter(evaluated))).loss.item()  # of an iteration that nobody holds
        model.train()
        (rest,) = skip_first_batches(loader, BATCHES - 1)
        assert rest["input_ids"].equal(last)
        unlike = inspect.unwrap(skip_first_batches)(loader, 1)  # one that burst could not know
        with pytest.raises(RefusedError, match=r"\(position_ids\): a forward over sharded sequences needs"):
            accelerator.unwrap_model(model)(**next(iter(unlike)))
        by_rank = torch.Generator().manual_seed(rank)
        shuffled = torch.utils.data.DataLoader(data, 1, True, generator=by_rank, collate_fn=collated)
        assert len([*accelerator.prepare(shuffled)]) == BATCHES, "ranks that share sequences have one order"
        get = deepspeed.utils.safe_get_full_fp32_param
        parameters = {n: get(p) for n, p in accelerator.unwrap_model(model).named_parameters()}
        found[stage] = losses, norms, parameters, seen, alone, turns, ended
        model.destroy()
        forget()
    return found, _truth(data, size // sp)


@pytest.mark.parametrize("sp", [4, pytest.param(2, marks=pytest.mark.slow)], ids=["SP4", "DP2xSP2"])
def test_accelerate(sp):
    """Training with Accelerate's own accumulation, then evaluation: every sample once, in order."""
    pytest.importorskip("accelerate")
    for rank, (found, truth) in enumerate(processes(4, _accelerate, sp, [1, 3])):
        want_losses, want_norms, want_parameters, evaluated = truth
        for losses, norms, parameters, seen, alone, turns, ended in found.values():
            assert losses == pytest.approx([row[rank // sp] for row in want_losses], rel=1e-5)
            assert norms == pytest.approx(want_norms, rel=1e-5)
            assert worst(parameters, want_parameters) < 1e-5
            assert seen == pytest.approx(evaluated, rel=1e-5)
            assert alone == pytest.approx(evaluated[rank], rel=1e-5)
            first = rank // sp * sp  # behind the end the iteration begins again
            assert turns == pytest.approx([*evaluated[first:][:sp], evaluated[first]], rel=1e-5)
            assert ended == pytest.approx(evaluated[rank // sp], rel=1e-5)


class Local(torch.nn.Module):
    def forward(self, *_):
        raise AssertionError("it is not called")


def _drop_in(rank, size, _):
    group, p = dist.group.WORLD, problem(0, 24, batch=2, heads=3, kv_heads=1)
    errors = []
    for first in (0, 1):  # where the tokens are
        attention = burst.BurstDistributedAttention(Local(), group, 2, first, mask=Mask.window(6, 0))
        local = [shard(x, 1, rank=rank, size=size, layout="contiguous") for x in (p.q, p.k, p.v, p.dout)]
        q, k, v, dout = (x if first else x.transpose(0, 1) for x in local)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, 1 - first)
        out.backward(dout)
        want = dense(p, Mask.window(6, 0))
        for got, whole in zip(
            [out, *(x.grad for x in leaves)], [want.out, want.dq, want.dk, want.dv], strict=True
        ):
            got = got.detach() if first else got.detach().transpose(0, 1)
            parts = [torch.empty_like(got.contiguous()) for _ in range(size)]
            dist.all_gather(parts, got.contiguous())
            errors.append((unshard(parts, 1, layout="contiguous") - whole).norm() / whole.norm())
    refused = []
    for arguments, call in (((1, 0), ()), ((2, 0), (torch.ones(1),))):
        try:
            attention = burst.BurstDistributedAttention(Local(), group, *arguments)
            attention(q, k, v, 1, None, *call)
        except RefusedError as error:
            refused.append(error.name)
    try:
        burst.BurstDistributedAttention(torch.nn.Sequential(torch.nn.Dropout(0.1)), group)
    except RefusedError as error:
        refused.append(error.name)
    return float(max(errors)), refused


def test_in_place_of_distributed_attention():
    for error, refused in processes(3, _drop_in, None):
        assert error < 1e-12
        assert refused == ["dimensions", "arguments", "dropout"]


def test_replaced_and_restored():
    from deepspeed.runtime.sequence_parallel import ulysses_sp

    own = copy.copy(ulysses_sp.UlyssesSPAttentionHF)
    for _ in range(2):
        burst.replace_ulysses()
    assert ulysses_sp.UlyssesSPAttentionHF is burst.BurstSPAttentionHF
    burst.restore_ulysses()
    assert ulysses_sp.UlyssesSPAttentionHF is own
    assert burst.BurstSPAttentionHF.register_with_transformers("name", "sdpa", 1, 1) is None
    with pytest.raises(RefusedError, match="give the model itself"):
        burst.BurstSPAttentionHF.register_with_transformers("name", "sdpa", 2, 1)


@pytest.mark.parametrize("adapter", ["deepspeed.accelerate.places", "torch.accelerate"])
def test_methods_take_arguments_by_the_names_of_those_in_whose_place_they_stand(adapter):
    pytest.importorskip("accelerate")
    for owner, name, make in importlib.import_module(f"burst_mcore.{adapter}")._places():
        function = inspect.getclosurevars(make).nonlocals.get("function")
        if function is not None:  # one that calls its original
            own = inspect.unwrap(getattr(owner, name))
            mine = inspect.signature(function).parameters.values()
            any_name = any(p.kind is p.VAR_KEYWORD for p in mine)
            lacks = {*inspect.signature(own).parameters} - {p.name for p in mine}
            assert any_name or not lacks, f"{name} takes no {lacks}"


def test_without_accelerate_it_says_what_to_use_instead():
    from accelerate.state import AcceleratorState

    from burst_mcore.deepspeed.accelerate.model import _read

    AcceleratorState._reset_state()
    with pytest.raises(RefusedError, match="make its Accelerator first.*burst_mcore.deepspeed.initialize"):
        _read(2)

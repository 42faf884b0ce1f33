"""Accelerate and callers of DistributedAttention, over burst: against one process."""

import copy

import deepspeed
import pytest
import torch
import torch.distributed as dist
from dense import dense, problem
from engines import dataset, model_of, plain_loss, quiet, worst
from ranks import on_ranks
from test_trainer import parallelism, sections
from trainers import forget

import burst_mcore.deepspeed as burst
from burst_mcore import Mask, shard
from burst_mcore.deepspeed.groups import unit_of
from burst_mcore.transformers.data.batches import collated
from burst_mcore.transformers.errors import UnsupportedError

skip_first_batches = pytest.importorskip("accelerate").skip_first_batches
GAS, BATCHES = 3, 8
"""Micro-batches a step, and in all; the last step has fewer."""


def _config(stage):
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": GAS}
    return {**sections(stage), **sizes, "gradient_clipping": 0.5}


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


@pytest.mark.parametrize("sp", [4, pytest.param(2, marks=pytest.mark.slow)], ids=["SP4", "DP2xSP2"])
@on_ranks(4)
def test_accelerate(rank, size, sp):
    """Training with Accelerate's own accumulation, then evaluation: every sample once, in order."""
    pytest.importorskip("accelerate")
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DeepSpeedPlugin

    quiet()
    burst.replace_ulysses()
    data = dataset(BATCHES * size // sp)
    want, want_norms, want_parameters, alone = _truth(data, size // sp)
    for stage in (1, 3):
        model = model_of()
        PartialState(cpu=True)  # as the Trainer does, so that Accelerate counts processes without a GPU
        plugin = DeepSpeedPlugin(hf_ds_config=_config(stage))
        accelerator = Accelerator(
            deepspeed_plugin=plugin, parallelism_config=parallelism(sp), gradient_accumulation_steps=GAS
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loaders = [
            torch.utils.data.DataLoader(rows, collate_fn=collated, batch_size=1) for rows in (data, data[:5])
        ]
        evaluated = accelerator.prepare(loaders[1])  # before its model is there
        model, optimizer, loader = accelerator.prepare(model, optimizer, loaders[0])
        model.eval()
        open_one = iter(evaluated)
        next(open_one)  # an evaluation that stays open in training
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
        open_one.close()
        last = batch["input_ids"]
        model.eval()
        seen, labels, names = [], [], []
        with torch.no_grad():
            for batch in evaluated:
                seen += accelerator.gather_for_metrics(model(**batch).loss[None]).tolist()
                padded = accelerator.pad_across_processes({"labels": batch["labels"]}, dim=1, pad_index=-100)
                labels += accelerator.gather_for_metrics(padded)["labels"].unbind()
                names += accelerator.gather_for_metrics([str(len(labels))])
            own = model(**collated(data[rank : rank + 1])).loss.item()  # a whole batch, of this rank
        whole = [a[: len(b["labels"])].equal(b["labels"]) for a, b in zip(labels, data[:5], strict=True)]
        assert all(whole) and len(names) == 5, "every sequence once and whole, in order"
        model.train()
        mine = torch.utils.data.DataLoader(data[rank : rank + 1], collate_fn=collated)
        group = unit_of(sp).sequence
        by_turns = burst.BurstSPDataLoaderAdapter(mine, rank % sp, group, sp, "cpu")
        with torch.no_grad():  # what no Accelerator prepared: each rank's own, one after the other
            turns = [model(**part).loss.item() for _ in range(2) for part in by_turns][: sp + 1]
        model.train()
        (rest,) = skip_first_batches(loader, BATCHES - 1)
        assert rest["input_ids"].equal(last)
        with pytest.raises(
            UnsupportedError, match=r"\(position_ids\): a forward over sharded sequences needs"
        ):
            accelerator.unwrap_model(model)(**next(iter(mine)))
        by_rank = torch.Generator().manual_seed(rank)
        shuffled = torch.utils.data.DataLoader(data, 1, True, generator=by_rank, collate_fn=collated)
        assert len([*accelerator.prepare(shuffled)]) == BATCHES, "ranks that share sequences have one order"
        get = deepspeed.utils.safe_get_full_fp32_param
        parameters = {n: get(p) for n, p in accelerator.unwrap_model(model).named_parameters()}
        assert losses == pytest.approx([row[rank // sp] for row in want], rel=1e-5)
        assert norms == pytest.approx(want_norms, rel=1e-5)
        assert worst(parameters, want_parameters) < 1e-5
        assert seen == pytest.approx(alone, rel=1e-5) and own == pytest.approx(alone[rank], rel=1e-5)
        first = rank // sp * sp  # behind the end the iteration begins again
        assert turns == pytest.approx([*alone[first:][:sp], alone[first]], rel=1e-5)
        model.destroy()
        forget()


class Local(torch.nn.Module):
    def forward(self, *_):
        raise AssertionError("it is not called")


@on_ranks(3)
def test_in_place_of_distributed_attention(rank, size):
    group, p, mask = dist.group.WORLD, problem(0, 24, batch=2, heads=3, kv_heads=1), Mask.window(6, 0)
    want = dense(p, mask)
    for first in (0, 1):  # where the tokens are
        attention = burst.BurstDistributedAttention(Local(), group, 2, first, mask=mask)
        local = [shard(x, 1, rank=rank, size=size, layout="contiguous") for x in (p.q, p.k, p.v, p.dout)]
        q, k, v, dout = (x if first else x.transpose(0, 1) for x in local)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, 1 - first)
        out.backward(dout)
        found = [out.detach(), *(x.grad for x in leaves)]
        for got, whole in zip(found, [want.out, want.dq, want.dk, want.dv], strict=True):
            mine = shard(whole, 1, rank=rank, size=size, layout="contiguous")
            got = got if first else got.transpose(0, 1)
            assert (got - mine).norm() < 1e-12 * whole.norm()
    for arguments, call, words in (((1, 0), (), "dimensions"), ((2, 0), (torch.ones(1),), "arguments")):
        with pytest.raises(UnsupportedError, match=words):
            burst.BurstDistributedAttention(Local(), group, *arguments)(q, k, v, 1, None, *call)
    with pytest.raises(UnsupportedError, match="dropout"):
        burst.BurstDistributedAttention(torch.nn.Sequential(torch.nn.Dropout(0.1)), group)


def test_replaced_and_restored():
    from accelerate.state import AcceleratorState
    from deepspeed.runtime.sequence_parallel import ulysses_sp

    from burst_mcore.deepspeed.accelerate import _read

    own = copy.copy(ulysses_sp.UlyssesSPAttentionHF)
    for _ in range(2):
        burst.replace_ulysses()
    assert ulysses_sp.UlyssesSPAttentionHF is burst.BurstSPAttentionHF
    burst.restore_ulysses()
    assert ulysses_sp.UlyssesSPAttentionHF is own
    assert burst.BurstSPAttentionHF.register_with_transformers("name", "sdpa", 1, 1) is None
    with pytest.raises(UnsupportedError, match="give the model itself"):
        burst.BurstSPAttentionHF.register_with_transformers("name", "sdpa", 2, 1)
    AcceleratorState._reset_state()  # without Accelerate it says what to use instead
    with pytest.raises(
        UnsupportedError, match="make its Accelerator first.*burst_mcore.deepspeed.initialize"
    ):
        _read(2)

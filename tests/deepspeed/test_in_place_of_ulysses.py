"""Accelerate, the Trainer and callers of DistributedAttention, over burst: against one process."""

import copy

import deepspeed
import pytest
import torch
import torch.distributed as dist
from dense import dense, problem
from engines import SMALL, dataset, model_of, plain_loss, quiet, worst
from ranks import processes

import burst_mcore.deepspeed as burst
from burst_mcore import Mask, shard, unshard
from burst_mcore.deepspeed.batches import collated
from burst_mcore.deepspeed.errors import RefusedError

STEPS, GAS = 2, 2


def _config(stage, gas):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, **SMALL},
        "zero_allow_untested_optimizer": True,
        "burst_attention": {"layout": "striped"},
    }


def _truth(data, sp):
    """Losses, norms and parameters of steps over GAS times the sequence groups' samples, of one process."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, norms = [], []
    each = GAS * (4 // sp)
    for step in range(STEPS):
        optimizer.zero_grad()
        found = torch.stack([plain_loss(model, sample) for sample in data[step * each : (step + 1) * each]])
        found.mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        losses.append(found.mean().item())
    return losses, norms, {name: p.detach() for name, p in model.named_parameters()}


def _mean(losses):
    """Over data-parallel ranks and micro-batches."""
    total = torch.tensor(losses).mean()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _parallelism(sp, world):
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    dp = {"dp_shard_size": world // sp} if world > sp else {}
    return ParallelismConfig(
        sp_backend="deepspeed", sp_size=sp, sp_handler=DeepSpeedSequenceParallelConfig(), **dp
    )


def _forget():
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def _accelerate(rank, size, sp, stages):
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, GradientAccumulationPlugin

    quiet()
    burst.replace_ulysses()
    found = {}
    for stage in stages:
        model = model_of()
        plugin = DeepSpeedPlugin(hf_ds_config=_config(stage, GAS))
        # A rank's own loader is at its end SP micro-batches before theirs is: that is no reason to step.
        steps = GradientAccumulationPlugin(GAS, sync_with_dataloader=False)
        accelerator = Accelerator(
            deepspeed_plugin=plugin,
            parallelism_config=_parallelism(sp, size),
            gradient_accumulation_plugin=steps,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = dataset(STEPS * GAS * size // sp)
        mine = data[rank // sp :: size // sp]  # of this data-parallel rank; each rank of its group loads some
        loader = torch.utils.data.DataLoader(mine[rank % sp :: sp], collate_fn=collated, batch_size=1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
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
        get = deepspeed.utils.safe_get_full_fp32_param
        parameters = {n: get(p) for n, p in accelerator.unwrap_model(model).named_parameters()}
        means = [_mean(losses[i : i + GAS]) for i in range(0, len(losses), GAS)]
        found[stage] = means, norms, parameters
        model.destroy()
        _forget()
    return found, _truth(data, sp)


def _close(found, truth):
    (losses, norms, parameters), (want_losses, want_norms, want_parameters) = found, truth
    assert losses == pytest.approx(want_losses, rel=1e-5)
    assert norms == pytest.approx(want_norms, rel=1e-5)
    assert worst(parameters, want_parameters) < 1e-5


@pytest.mark.parametrize("sp", [4, pytest.param(2, marks=pytest.mark.slow)], ids=["SP4", "DP2xSP2"])
def test_accelerate(sp):
    pytest.importorskip("accelerate")
    for found, truth in processes(4, _accelerate, sp, [1, 3]):
        for of in found.values():
            _close(of, truth)


def _trainer(rank, size, sp, stages, folder):
    from transformers import Trainer, TrainingArguments

    quiet()
    burst.replace_ulysses()
    found = {}
    for stage in stages:
        data, model = dataset(STEPS * GAS * size // sp), model_of()
        arguments = TrainingArguments(
            f"{folder}/{rank}", use_cpu=True, deepspeed=_config(stage, GAS), max_steps=STEPS,
            parallelism_config=_parallelism(sp, size), per_device_train_batch_size=1,
            gradient_accumulation_steps=GAS, max_grad_norm=0.5, learning_rate=0.1,
            lr_scheduler_type="constant", optim="sgd", weight_decay=0.0, logging_steps=1, save_strategy="no",
            report_to=[], disable_tqdm=True, remove_unused_columns=False,
            train_sampling_strategy="sequential",
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=data, data_collator=collated)
        trainer.train()
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        get = deepspeed.utils.safe_get_full_fp32_param
        parameters = {n: get(p) for n, p in trainer.model.named_parameters()}
        found[stage] = [entry["loss"] for entry in log], [entry["grad_norm"] for entry in log], parameters
        for name, own in (("label_smoothing_factor", "label_smoother"), ("compute_loss_func",) * 2):
            setattr(trainer, own, print)
            with pytest.raises(RefusedError, match=f"Trainer's {name} is not served"):
                trainer.compute_loss(trainer.model, {})
            setattr(trainer, own, None)
        trainer.model_wrapped.destroy()
        _forget()
    return found, _truth(data, sp)


@pytest.mark.parametrize(
    ("sp", "stages"),
    [
        (2, [3]),
        pytest.param(2, [2], marks=pytest.mark.slow),
        pytest.param(4, [2, 3], marks=pytest.mark.slow),
    ],
    ids=["DP2xSP2 3", "DP2xSP2 2", "SP4"],
)
def test_trainer(sp, stages, tmp_path):
    pytest.importorskip("accelerate")
    for found, truth in processes(4, _trainer, sp, stages, str(tmp_path)):
        for of in found.values():
            _close(of, truth)


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


def test_without_accelerate_it_says_what_to_use_instead():
    from accelerate.state import AcceleratorState

    from burst_mcore.deepspeed.ulysses import _read

    AcceleratorState._reset_state()
    with pytest.raises(RefusedError, match="make its Accelerator first.*burst_mcore.deepspeed.initialize"):
        _read(2)

"""Training steps of a small Llama under FSDP2: torch's context_parallel, Ulysses by all-to-alls, and ours.

All loops are written by hand, and fully_shard averages gradients over the ranks. So a rank's part of the mean
loss is multiplied by the number of ranks: their loops do it, ours detects it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from burst_bench.core import Method, World, add, shared_heads
from burst_bench.methods.peers import ROTATES, choose
from burst_bench.methods.steps import OURS, StepSetting, Train, TrainedCase, attend_by, causal, llama, needs
from burst_bench.methods.steps import first_loss as first_loss
from burst_mcore.layout import shard
from burst_plan.explain.problem import DTYPES

IGNORED = -100
Sharding = Callable[[], AbstractContextManager[Mapping[str, Tensor]]]
"""Returns a context in which a step runs, with this rank's part of the batch."""


def start(case: TrainedCase, world: World) -> None:
    """Silence the log: each of our methods would report how many ranks share a sequence."""
    logging.getLogger("burst_mcore").setLevel(logging.ERROR)


def _ours(setting: StepSetting, case: TrainedCase, world: World) -> Train:
    from burst_mcore.torch import parallelize

    model, head = llama(case).to(world.device), "fused" if setting.fused else "model"
    policy = setting.recompute
    cp = parallelize(model, world.group, config=setting.config, loss=head, checkpointing=policy)
    batch = {name: x.to(world.device) for name, x in cp.shard({"input_ids": case.sample}).items()}

    def backward() -> Tensor:
        loss: Tensor = model(**batch).loss
        loss.backward()
        return loss.detach()

    return _train(model, case, world, backward)


def _theirs(case: TrainedCase, world: World, attention: Callable[..., Any], sharding: Sharding) -> Train:
    """Return the step of a loop that shards a batch by itself. Collective."""
    model = llama(case).to(world.device)
    attend_by(model, attention)

    def backward() -> Tensor:
        with sharding() as batch:
            labels = batch["shift_labels"]
            loss = model(**batch, labels=labels, num_items_in_batch=case.seq - 1, use_cache=False).loss
            (loss * case.ranks).backward()
        mean: Tensor = loss.detach()
        dist.all_reduce(mean)
        return mean

    return _train(model, case, world, backward)


def _train(model: Any, case: TrainedCase, world: World, backward: Callable[[], Tensor]) -> Train:
    """Return the step of a model whose layers are sharded over all ranks."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    precision = MixedPrecisionPolicy(param_dtype=DTYPES[case.dtype], reduce_dtype=torch.float32)
    mesh = DeviceMesh.from_group(world.group, world.device)
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)

    def step() -> float:
        optimizer.zero_grad()
        loss = backward()
        optimizer.step()
        return float(loss)

    return step


def _batch(case: TrainedCase, world: World) -> dict[str, Tensor]:
    """Return a whole sequence: tokens, positions, and the next tokens as labels."""
    labels = case.sample.roll(-1, 1)
    labels[:, -1] = IGNORED
    batch = {"input_ids": case.sample, "position_ids": torch.arange(case.seq)[None], "shift_labels": labels}
    return {name: x.to(world.device) for name, x in batch.items()}


def _context_parallel(rotates: str, case: TrainedCase, world: World) -> Train:
    """Return FSDP2 x context_parallel: torch shards buffers zigzag, and replaces sdpa within its context."""
    mesh, batch = DeviceMesh.from_group(world.group, world.device), _batch(case, world)

    @contextmanager
    def sharding() -> Iterator[Mapping[str, Tensor]]:
        from torch.distributed.tensor.experimental import context_parallel

        choose(rotates)
        share = {name: x.clone() for name, x in batch.items()}
        buffers = [*share.values()]
        with context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers={*buffers}
        ):
            yield share

    return _theirs(case, world, causal, sharding)


def _ulysses(case: TrainedCase, world: World) -> Train:
    """Return FSDP2 with Ulysses: an all-to-all of torch's before attention, and another after it."""
    part_of = partial(shard, dim=1, rank=world.rank, size=world.size, layout="contiguous")
    share = {name: part_of(x) for name, x in _batch(case, world).items()}

    def attend(module: object, *qkv: Tensor, **__: object) -> tuple[Tensor, None]:
        out, _ = causal(module, *(exchanged(x, world.group) for x in qkv[:3]))
        return exchanged(out, world.group), None

    return _theirs(case, world, attend, lambda: nullcontext(share))


def exchanged(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return x with dim 1 sharded over the ranks, and dim 2 gathered: heads and tokens. Collective."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    parts = torch.stack(x.chunk(group.size(), 1))
    parcels: Tensor = all_to_all_single_autograd(parts, None, None, group)
    return torch.cat(parcels.unbind(), 2)


def _ulysses_needs(case: TrainedCase, device: str) -> str | None:
    return THEIRS(case, device) or shared_heads(case, case.ranks)


NEEDS = partial(needs, ["transformers"])
THEIRS = partial(NEEDS, None)
add(
    "fsdp",
    *(Method(f"torch-{word}", partial(_context_parallel, word), THEIRS, ours=False) for word in ROTATES),
    Method("torch-ulysses", _ulysses, _ulysses_needs, ours=False),
    *(Method(name, partial(_ours, setting), partial(NEEDS, setting)) for name, setting in OURS.items()),
)

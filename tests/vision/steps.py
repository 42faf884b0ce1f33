"""Steps of training with pictures: engines, FSDP2 and DDP, and one process beside."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from equal import GRIDS, TOKENS
from families import batch_of, model_of, pictures
from torch import Tensor
from torch.utils.data import DataLoader

STEPS, RATE = 2, 0.05


def batches(model: Any, replica: int = 0) -> list[dict[str, Tensor]]:
    """A row with two images, then one without the smallest: each replica begins with another."""
    whole = pictures(model, GRIDS)
    two = batch_of(model, [[3, 25, 55]], TOKENS, whole)
    one = batch_of(model, [[9]], TOKENS - 6, pictures(model, GRIDS[2:]))
    return [two, one] if replica == 0 else [one, two]


def one_process(name: str, replicas: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    """(losses, weights) after all steps."""
    model = model_of(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        each = [model(**batches(model, r)[step], use_cache=False).loss for r in range(replicas)]
        loss = torch.stack(each).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, {key: p.detach().clone() for key, p in model.named_parameters()}


def on_deepspeed(rank: int, size: int, name: str, stage: int, sp: int, **section: Any) -> Any:
    """The same on an engine of `initialize`."""
    import deepspeed
    from engines import config_of, quiet

    import burst_mcore.deepspeed as burst

    quiet()
    torch.use_deterministic_algorithms(False)
    model = model_of(name)
    rows = batches(model, rank // sp)
    config = config_of(stage, sp, **section) | {"optimizer": {"type": "SGD", "params": {"lr": RATE}}}
    engine, *_ = burst.initialize(model, config)
    losses = []
    for batch in burst.shard_loader(DataLoader(rows, batch_size=None), engine):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(mean_of(loss.detach()))
    get = deepspeed.utils.safe_get_full_fp32_param
    found = {key: get(p) if stage else p.detach() for key, p in engine.module.named_parameters()}
    return losses, found


def by_hand(rank: int, size: int, name: str, wrapper: str, sp: int, **options: Any) -> Any:
    """The same in a loop under FSDP2 or DDP."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from burst_mcore.torch import parallelize

    torch.use_deterministic_algorithms(False)
    mesh = init_device_mesh("cpu", (size // sp, sp), mesh_dim_names=("dp", "cp"))
    model = wrapped = model_of(name)
    rows = batches(model, rank // sp)
    cp = parallelize(model, mesh["cp"], **options)
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        both = mesh["dp", "cp"]._flatten("dp_cp")
        text = model.get_decoder()
        towers = [m for m in model.modules() if type(m).__name__.endswith(("VisionBlock", "EncoderLayer"))]
        for layer in [*text.layers, *towers]:
            fully_shard(layer, mesh=both)
        fully_shard(model, mesh=both)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for batch in cp.loader(rows):
        loss = wrapped(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_of(loss.detach()))
    return losses, {
        key: getattr(p, "full_tensor", lambda p=p: p)().detach() for key, p in model.named_parameters()
    }


def mean_of(loss: Tensor) -> float:
    whole = loss.clone()
    dist.all_reduce(whole)
    return float(whole) / dist.get_world_size()

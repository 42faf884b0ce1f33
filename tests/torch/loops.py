"""A training loop by hand under FSDP2 or DDP, and the same loop of one process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from causal_lms import dataset, model_of, worst
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from burst_mcore.agreement.claims import OthersError
from burst_mcore.torch import UnsupportedError, parallelize

STEPS, CLIP, RATE = 3, 0.5, 0.1
LENGTHS = (37, 29, 41, 31)
"""Primes, so that every sequence is padded."""


@dataclass(frozen=True)
class Case:
    """How a model is trained."""

    mesh: dict[str, int]
    """Dims of the mesh, in order; "cp" is one of them."""
    wrapper: str = "fsdp"
    accumulated: int = 1
    packed: bool = False
    compiled: bool = False
    lora: bool = False
    casts: bool = False
    """Whether FSDP2 casts what modules get, here to the dtype that it has."""
    sums: bool = False
    """Whether FSDP2 adds gradients, and divides them by nothing."""
    plan: str = "torch"
    """Whose styles shard the weights over tp."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of `parallelize`."""
    model: dict[str, Any] = field(default_factory=dict)
    """Of `model_of`."""

    @property
    def replicas(self) -> int:
        return self.mesh.get("dp", 1) * self.mesh.get("dp_replicate", 1) * self.mesh.get("dp_shard", 1)


def mesh_of(size: int, *names: str) -> Any:
    """A mesh of `size` ranks over cp, or of two ranks over each of `names`; the log is quiet."""
    logging.getLogger("burst_mcore").setLevel("ERROR")
    sizes = (2,) * len(names) if names else (size,)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names or ("cp",))


def refused(do: Callable[[], Any], kind: type[ValueError] = UnsupportedError) -> str:
    """What the error of `do` says."""
    with pytest.raises(kind) as caught:
        do()
    return str(caught.value)


def refuses(*cases: tuple[str | tuple[str, ...], Callable[[], Any]]) -> None:
    """Hold what each call says to "name: words ... more words", of all ranks or of this one.

    The name of an OthersError is "another rank".
    """
    for given, do in cases:
        name, _, words = (given if isinstance(given, str) else given[dist.get_rank()]).partition(": ")
        others = name == "another rank"
        said = refused(do, OthersError if others else UnsupportedError)
        assert others or said.startswith(f"unsupported ({name})"), (given, said)
        assert all(part.strip() in said for part in words.split("...")), (given, said)


def gradients_of(*models: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients of all parameters, by the number of the model and the parameter's name."""
    named = {f"{i}.{name}": p.grad for i, model in enumerate(models) for name, p in model.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in named.items()}


def assert_alike(found: Any, want: Any, rtol: float, of_gradients: float) -> None:
    """Hold (loss, gradients or weights) of each rank to those of one process."""
    for loss, mine in found:
        assert loss == pytest.approx(want[0], rel=rtol)
        assert worst(mine, want[1]) < of_gradients


def samples(case: Case, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Batches of one row, of prime lengths; the labels of some are few."""
    count = STEPS * case.accumulated * case.replicas
    rows = [dataset(2, tokens=LENGTHS[i % 4], seed=seed + i)[i % 2] for i in range(count)]
    if case.packed:
        for row in rows:
            n = len(row["input_ids"])
            row["position_ids"] = torch.cat([torch.arange(11), torch.arange(n - 11)])
            row["labels"][[0, 11]] = -100  # nobody's: plain transformers would count the second
    return [{name: x[None] for name, x in row.items()} for row in rows]


def built(case: Case) -> torch.nn.Module:
    model = model_of(**case.model)
    if case.lora:
        import peft

        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.2)
    return model


def one_process(case: Case) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """(losses, norms, weights) after all steps."""
    model, rows = built(case), iter(samples(case))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    losses, norms = [], []
    for _ in range(STEPS):
        each = [model(**next(rows), use_cache=False).loss for _ in range(case.accumulated * case.replicas)]
        loss = torch.stack(each).mean()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()}


def wrapped(model: torch.nn.Module, case: Case, mesh: Any) -> torch.nn.Module:
    """The model under DDP, or under FSDP2 over all dims but tp."""
    if case.wrapper == "ddp":
        return DistributedDataParallel(model)
    inner = model.get_base_model() if case.lora else model
    shards = [name for name in case.mesh if name not in ("tp", "dp_replicate")]
    over = mesh[tuple(shards)]._flatten("shards") if len(shards) > 1 else mesh[shards[0]]
    if "dp_replicate" in case.mesh:
        over = mesh["dp_replicate", "shards"] if len(shards) > 1 else mesh["dp_replicate", shards[0]]
    policy = MixedPrecisionPolicy(param_dtype=torch.float32 if case.casts else None)
    for layer in inner.model.layers:
        if case.compiled and "checkpointing" in case.options:  # which stays outside of what is compiled
            layer.forward = torch.compile(layer.forward, backend="eager")
        elif case.compiled:
            layer.compile(backend="eager")
        fully_shard(layer, mesh=over, mp_policy=policy)
    fully_shard(model, mesh=over, mp_policy=policy)
    for module in model.modules():
        if case.sums and isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale what it adds
    return model


def tensor_parallel(model: torch.nn.Module, mesh: Any, plan: str = "torch") -> None:
    """Shard heads, MLPs and the vocabulary over a mesh, and put all other weights on it."""
    (_by_torch if plan == "torch" else _by_transformers)(model, mesh)
    for module in [*model.modules()]:
        plain = [p for p in module.parameters(recurse=False) if not isinstance(p, DTensor)]
        if plain:
            distribute_module(
                module,
                mesh,
                input_fn=lambda _, inputs, mesh: tuple(
                    DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs
                ),
                output_fn=lambda _, out, mesh: out.to_local(),
            )


def _by_transformers(model: torch.nn.Module, mesh: Any) -> None:
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan = {}
    for name, style in model.tp_plan.items():
        for i in range(len(model.model.layers)):
            each = name.replace("*", str(i))
            plan |= {each: style, f"{each}.weight": style}
    apply_tensor_parallelism(model, mesh, plan)


def _by_torch(model: torch.nn.Module, mesh: Any) -> None:
    adapted = [f"self_attn.{x}_proj" for x in "qv"] if hasattr(model, "peft_config") else []
    into = [f"self_attn.{x}_proj" for x in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    places = {name: RowwiseParallel for name in ("self_attn.o_proj", "mlp.down_proj")}
    for name in into:  # of an adapter the second factor makes the heads
        own = (f"{name}.base_layer", f"{name}.lora_B.default") if name in adapted else (name,)
        places |= dict.fromkeys(own, ColwiseParallel)
    inner = model.get_base_model() if adapted else model
    plan: dict[str, Any] = {f"model.layers.*.{name}": style() for name, style in places.items()}
    parallelize_module(inner, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate()), **plan})


def by_hand(rank: int, size: int, case: Case) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The loop of `one_process`, over a mesh."""
    logging.getLogger("burst_mcore").setLevel("ERROR")
    mesh = init_device_mesh("cpu", tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh))
    model = built(case)
    if "tp" in case.mesh:
        tensor_parallel(model, mesh["tp"], case.plan)
    cp = parallelize(model, mesh["cp"], **case.options)
    engine = wrapped(model, case, mesh)
    if case.compiled and case.wrapper == "ddp":
        engine.compile(backend="eager")
    optimizer = torch.optim.SGD([p for p in engine.parameters() if p.requires_grad], lr=RATE)
    names = [name for name in case.mesh if name.startswith("dp")]
    replica = 0
    for name in names:
        replica = replica * case.mesh[name] + mesh.get_local_rank(name)
    rows = samples(case)[replica :: case.replicas]
    losses, norms = [], []
    for step in range(STEPS):
        total = torch.zeros(())
        for turn, row in enumerate(rows[step * case.accumulated :][: case.accumulated]):
            last = turn == case.accumulated - 1
            if case.wrapper == "fsdp":
                engine.set_requires_gradient_sync(last)
            with nullcontext() if last or case.wrapper == "fsdp" else engine.no_sync():
                loss = engine(**cp.shard(row)).loss / case.accumulated
                loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / size)
        norm = torch.nn.utils.clip_grad_norm_(engine.parameters(), CLIP)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, whole_weights(model)


def whole_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }

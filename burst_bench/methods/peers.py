"""Attention of other projects over ranks: torch's own context_parallel, and two libraries for GPUs.

torch's table has the operators of GPUs: this file adds two of CPUs. Within context_parallel, a call of
scaled_dot_product_attention runs a template of torch's with the operator that the call chose. A template's
messages, their order, and its merges are torch's on both devices.

Each library is imported when its method is built. The calls follow the sources: megatron-core 0.19.2,
TransformerEngine d0067d0, ring-flash-attention of August 2025. They ran with stand-ins of these signatures,
and nothing here was ever run on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from burst_bench.core import Method, World, add, missing, shared_heads
from burst_bench.methods.attention import RingCase, ShardedAttention, divisible
from burst_bench.published.rows import LAYOUTS
from burst_mcore.mask import Mask

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
ROTATES = {"ring": "alltoall", "gather": "allgather"}
"""Rotation of keys and values, by our name: in ring steps, or gathered at once, which is torch's default."""


def templates() -> Any:
    """Return torch's module of templates, whose table has the operators of CPUs from now on."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    module: Any = _attention
    module.custom_ops.update(dict.fromkeys((FORWARD, BACKWARD), _on_cpu))
    return module


def choose(rotates: str, balanced: bool = True) -> None:
    """Set the options of all templates: the rotation of keys, and whether the sequence is sharded zigzag."""
    templates().set_rotate_method(ROTATES[rotates])
    templates()._cp_options.enable_load_balance = balanced


def _on_cpu(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Run the template of an operator of CPUs, as torch's table does for operators of GPUs."""
    from torch.distributed.tensor import DTensor

    names = (argument.name for argument in operator._schema.arguments)
    values = dict(zip(names, args, strict=False))  # callers leave out arguments at the end that have defaults
    query, causal = values["query"], values.get("is_causal", False)
    local: list[Any] = [x.to_local() for x in args if isinstance(x, DTensor)]
    mesh, run = query.device_mesh, templates()._templated_ring_attention
    if operator is BACKWARD:
        run, local = templates()._templated_ring_attention_backward, [local[0], "grad_out", *local[1:]]
    results = run(mesh.get_group(), 2, operator, *local, is_causal=causal, dropout_p=0.0, **kwargs)
    return tuple(DTensor.from_local(x, mesh, query.placements, run_check=False) for x in results)


def _torch(case: RingCase, world: World, rotates: str) -> ShardedAttention:
    """Return torch's attention of zigzag shards, or of contiguous ones without a mask."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    causal, mesh = case.seen == Mask.causal(), DeviceMesh.from_group(world.group, world.device)
    templates()._enable_context_parallel_dispatcher()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        choose(rotates, balanced=causal)  # methods alternate; a backward follows its forward
        q, k, v = (
            DTensor.from_local(x.transpose(1, 2), mesh, [Shard(2)], run_check=False) for x in (q, k, v)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        local: Tensor = out.to_local()  # type: ignore[attr-defined]
        return local.transpose(1, 2)

    return ShardedAttention("zigzag" if causal else "contiguous", world, attend)


def _needs(
    case: RingCase, device: str, packages: Sequence[str] = (), full: bool = True, heads: int = 1
) -> str | None:
    """Return the unmet requirement of a method, or of a method for GPUs that calls packages.

    full: whether it supports attention without a mask; heads: ranks of a group that shares heads.
    """
    if packages and device != "cuda":
        return "a GPU for each rank: torchrun ... --device cuda"
    if lacks := missing(*packages):
        return lacks
    if case.seen not in ((Mask.causal(), Mask.full()) if full else (Mask.causal(),)):
        return f"a mask that is causal{' or full' if full else ''}, got {case.mask}"
    if device == "cuda" and case.dtype == "float32":
        return "bfloat16 or float16, got float32"
    return shared_heads(case, heads) or divisible(case, device)


def _megatron(case: RingCase, world: World, comm: str) -> ShardedAttention:
    """Return TEDotProductAttention, of [sequence, batch, heads, head_dim], zigzag: heads are joined."""
    from megatron.core import parallel_state
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        node = _of_node(world.size)
        levels = [node, world.size // node] if 1 < node < world.size else None  # for a2a+p2p
        parallel_state.initialize_model_parallel(
            context_parallel_size=world.size, hierarchical_context_parallel_sizes=levels
        )
    mask = AttnMaskType.causal if case.seen == Mask.causal() else AttnMaskType.no_mask
    config = TransformerConfig(
        num_layers=1, hidden_size=case.heads * case.head_dim, num_attention_heads=case.heads,
        num_query_groups=case.kv_heads, kv_channels=case.head_dim, attention_dropout=0.0,
        context_parallel_size=world.size,
    )  # fmt: skip
    layer = TEDotProductAttention(
        config, 1, mask, "self", softmax_scale=case.head_dim**-0.5, cp_comm_type=comm
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = layer(*(x.transpose(0, 1).contiguous() for x in (q, k, v)), None, mask)
        by_head: Tensor = out.unflatten(2, (case.heads, case.head_dim)).transpose(0, 1)
        return by_head

    return ShardedAttention("zigzag", world, attend)


def _of_node(ranks: int) -> int:
    """Return the number of ranks that torchrun started on this node; by default all."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def _ring_flash_attn(case: RingCase, world: World, function: str, layout: str) -> ShardedAttention:
    import ring_flash_attn  # type: ignore[import-not-found]

    # It requires a group of one backend.
    group = dist.new_group(backend="nccl" if world.device == "cuda" else None)
    run = partial(getattr(ring_flash_attn, function), causal=case.seen == Mask.causal(), group=group)
    return ShardedAttention(layout, world, run)


def _te_needs(case: RingCase, device: str, comm: str) -> str | None:
    node = _of_node(case.ranks)
    if comm == "a2a+p2p" and device == "cuda" and 1 in (node, case.ranks // node):
        return "several nodes of several ranks"
    heads = {"a2a": case.ranks, "a2a+p2p": node}.get(comm, 1)
    return _needs(case, device, ["megatron-core", "transformer-engine"], heads=heads)


_MEGATRON = {"p2p": "ring", "all_gather": "all-gather", "a2a": "ulysses", "a2a+p2p": "usp"}
_FUNCTIONS = {
    "zigzag": "zigzag_ring_flash_attn_func",
    "stripe": "stripe_flash_attn_func",
    "basic": "ring_flash_attn_func",
}

add(
    "attention",
    *(
        Method(
            f"torch-{rotates}", partial(_torch, rotates=rotates), _needs, ours=False,
            row={"method": method, "variant": "zigzag"},
        )
        for rotates, method in {"ring": "ring", "gather": "all-gather"}.items()
    ),
    *(
        Method(
            f"te-{comm}", partial(_megatron, comm=comm), partial(_te_needs, comm=comm), ours=False,
            row={"method": method, "variant": "zigzag"},
        )
        for comm, method in _MEGATRON.items()
    ),
    *(
        Method(
            f"ring-flash-attn-{word}",
            partial(_ring_flash_attn, function=function, layout=LAYOUTS[word]),
            partial(_needs, packages=["ring-flash-attn"], full=word == "basic"),
            ours=False,
            row={"method": "ring", "variant": word},
        )
        for word, function in _FUNCTIONS.items()
    ),
)  # fmt: skip

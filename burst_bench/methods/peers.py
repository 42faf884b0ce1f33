"""Attention of other projects over ranks: torch's own ring templates, and four libraries for GPUs.

Each library is imported where its method is built. The calls follow the sources: megatron-core 0.19.2,
TransformerEngine d0067d0, ring-flash-attention of August 2025, yunchang 0.6.4, MagiAttention 2c64135. They
ran with stand-ins of these signatures, and were never run on a GPU.

Torch's `context_parallel` knows the operators of GPUs alone. The templates below it take any operator, so
that of the CPU runs here over gloo; messages and merging are torch's. On a GPU this was never run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from burst_bench.core import Method, World, add, missing
from burst_bench.methods.sharded import VARIANTS, AttendedBy, RingCase, ShardedAttention, dealt, divisible
from burst_mcore.layout import shard, unshard
from burst_mcore.mask import Mask

CHUNK = 512
"""Tokens that MagiAttention moves as one, at most."""
aten = torch.ops.aten


def _library_needs(
    case: RingCase, device: str, packages: Sequence[str], full: bool = True, heads: int = 1
) -> str | None:
    """Return the need of a method of libraries for GPUs."""
    if device != "cuda":
        return "a GPU for each rank: torchrun ... --device cuda"
    return missing(*packages) or _needs(case, device, full, heads)


def _needs(case: RingCase, device: str, full: bool = True, heads: int = 1) -> str | None:
    """Return the need of a method.

    full: whether it serves attention without a mask; heads: ranks of a group that shares heads.
    """
    if case.seen not in ((Mask.causal(), Mask.full()) if full else (Mask.causal(),)):
        return f"a mask that is causal{' or full' if full else ''}, got {case.mask}"
    if device == "cuda" and case.dtype == "float32":
        return "bfloat16 or float16, got float32"
    if case.ranks % heads or case.heads % heads or case.kv_heads % heads:
        return f"ranks, heads and K/V heads that are multiples of {heads}"
    return divisible(case, device)


def _causal(case: RingCase) -> bool:
    return case.seen == Mask.causal()


def _group(world: World, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """Return a group for tensors of the device alone, as these libraries want it. Collective."""
    group: dist.ProcessGroup = dist.new_group(ranks, backend="nccl" if world.device == "cuda" else None)
    return group


def _megatron(case: RingCase, world: World, comm: str) -> ShardedAttention:
    """TEDotProductAttention, of [sequence, batch, heads, head_dim], zigzag: its result has heads as one."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    mask = AttnMaskType.causal if _causal(case) else AttnMaskType.no_mask
    config = TransformerConfig(
        num_layers=1,
        hidden_size=case.heads * case.head_dim,
        num_attention_heads=case.heads,
        num_query_groups=case.kv_heads,
        kv_channels=case.head_dim,
        attention_dropout=0.0,
        context_parallel_size=world.size,
    )
    group, levels = _group(world), _levels(world) if comm == "a2a+p2p" else None
    groups = ProcessGroupCollection(tp=None, cp=group, hcp=levels)
    layer = TEDotProductAttention(
        config, 1, mask, "self", softmax_scale=case.head_dim**-0.5, cp_comm_type=comm, pg_collection=groups
    )
    if levels is not None:  # Megatron takes those of its global state, which is not there
        ranks = list(range(world.size))
        layer.set_context_parallel_group(levels, ranks, TEDotProductAttention.cp_stream, comm)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = layer(*(x.transpose(0, 1).contiguous() for x in (q, k, v)), None, mask)
        by_head: Tensor = out.unflatten(2, (case.heads, case.head_dim)).transpose(0, 1)
        return by_head

    return dealt("zigzag", world, attend)


def _of_node(ranks: int) -> int:
    """Return how many ranks torchrun started on this node; by default all."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks))


def _levels(world: World) -> list[dist.ProcessGroup]:
    """Return the groups of this rank's node, and of its counterparts on other nodes."""
    within = _of_node(world.size)
    nodes = [list(range(first, first + within)) for first in range(0, world.size, within)]
    rows = [(ranks, _group(world, ranks)) for ranks in (*nodes, *map(list, zip(*nodes, strict=True)))]
    return [group for ranks, group in rows if world.rank in ranks]


def _ring_flash_attn(case: RingCase, world: World, function: str, layout: str) -> ShardedAttention:
    import ring_flash_attn  # type: ignore[import-not-found]

    run = getattr(ring_flash_attn, function)
    return dealt(layout, world, partial(run, causal=_causal(case), group=_group(world)))


def _yunchang(case: RingCase, world: World, ring: str, layout: str, heads: int) -> ShardedAttention:
    from yunchang import LongContextAttention, set_seq_parallel_pg  # type: ignore[import-not-found]

    set_seq_parallel_pg(heads, world.size // heads, world.rank, world.size)
    layer = LongContextAttention(ring_impl_type=ring)
    return _grouped(layout, heads, world, partial(layer, causal=_causal(case)))


def _grouped(layout: str, heads: int, world: World, attend: AttendedBy) -> ShardedAttention:
    """Return a method whose groups of `heads` consecutive ranks are dealt a layout, and split their rows."""
    groups, (place, member) = world.size // heads, divmod(world.rank, heads)

    def own(x: Tensor) -> Tensor:
        return shard(x, dim=1, rank=place, size=groups, layout=layout).chunk(heads, dim=1)[member]

    def whole(parts: Sequence[Tensor]) -> Tensor:
        joined = [torch.cat([*parts[i : i + heads]], 1) for i in range(0, world.size, heads)]
        return unshard(joined, dim=1, layout=layout)

    return ShardedAttention(attend, own, whole)


def _magi(case: RingCase, world: World) -> ShardedAttention:
    """MagiAttention, of [tokens, heads, head_dim], which deals chunks of the sequence as it sees fit."""
    from magi_attention import api  # type: ignore[import-not-found]
    from magi_attention.config import DispatchConfig, DistAttnConfig  # type: ignore[import-not-found]

    ends = torch.tensor([0, case.seq], dtype=torch.int32, device=world.device)
    chunks = DispatchConfig(chunk_size=math.gcd(case.seq // world.size, CHUNK))
    key = api.magi_attn_varlen_key(
        cu_seqlens_q=ends,
        cu_seqlens_k=ends,
        num_heads_q=case.heads,
        num_heads_kv=case.kv_heads,
        head_dim=case.head_dim,
        pad_size=0,
        cp_group_or_mesh=_group(world),
        causal=_causal(case),
        dist_attn_config=DistAttnConfig(dispatch_config=chunks),
    )
    mine = api.get_position_ids(key).cpu().long()
    places = [mine] * world.size
    dist.all_gather_object(places, mine)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = api.calc_attn(*(x[0].contiguous() for x in (q, k, v)), key)
        return out[None]  # type: ignore[no-any-return]

    order = torch.cat(places).argsort()
    return ShardedAttention(attend, lambda x: x[:, mine], lambda parts: torch.cat([*parts], 1)[:, order])


def _magi_needs(case: RingCase, device: str) -> str | None:
    if device == "cuda" and case.batch != 1:
        return f"a batch of 1, got {case.batch}"
    return _library_needs(case, device, ["magi-attention"])


def _te_needs(case: RingCase, device: str, comm: str) -> str | None:
    libraries = ["megatron-core", "transformer-engine"]
    node = _of_node(case.ranks)
    if comm == "a2a+p2p" and device == "cuda" and 1 in (node, case.ranks // node):
        return "several nodes of several ranks"
    heads = {"a2a": case.ranks, "a2a+p2p": node}.get(comm, 1)
    return _library_needs(case, device, libraries, heads=heads)


class Flash(NamedTuple):
    """The flash operators of a device."""

    forward: Any
    backward: Any
    kept: tuple[str, ...] = ()
    """What backward takes of forward's further results, by their place; "" for a result that it does not."""


OPERATORS = {
    "cpu": Flash(
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    ),
    "cuda": Flash(
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_backward,
        ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset", ""),
    ),
}


class _RingAttention(torch.autograd.Function):
    """Both templates, of [batch, heads, local sequence, head_dim]; rows are dealt zigzag if causal."""

    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, method: str, causal: bool, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        _set(method, causal)
        flash = OPERATORS[q.device.type]
        run = _templates()._templated_ring_attention
        out, lse, *rest = run(group, 2, flash.forward, q, k, v, is_causal=causal, dropout_p=0.0)
        ctx.save_for_backward(q, k, v, out, lse)
        named = zip(flash.kept, rest, strict=True)
        ctx.call = group, method, causal, flash.backward, {name: value for name, value in named if name}
        return out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        group, method, causal, operator, kept = ctx.call
        _set(method, causal)
        run = _templates()._templated_ring_attention_backward
        dq, dk, dv, *_ = run(
            group, 2, operator, dout, "grad_out", q, k, v, out, lse, is_causal=causal, dropout_p=0.0, **kept
        )
        return None, None, None, dq, dk, dv


def _templates() -> Any:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention


def _set(method: str, causal: bool) -> None:
    """Set the options of the templates, which are global: how keys travel, and whether work is balanced."""
    _templates().set_rotate_method(method)
    _templates()._cp_options.enable_load_balance = causal


def _torch(case: RingCase, world: World, method: str) -> ShardedAttention:
    causal = _causal(case)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = _RingAttention.apply(world.group, method, causal, *heads_first)  # type: ignore[no-untyped-call]
        return out.transpose(1, 2)

    return dealt("zigzag" if causal else "contiguous", world, attend)


def _torch_needs(case: RingCase, device: str) -> str | None:
    if (lacks := _needs(case, device)) is None and case.heads != case.kv_heads:
        return f"as many K/V heads as heads, got {case.kv_heads} and {case.heads}"
    return lacks


_MEGATRON = {"p2p": "ring", "all_gather": "all-gather", "a2a": "ulysses", "a2a+p2p": "usp"}
_FUNCTIONS = {
    "zigzag": "zigzag_ring_flash_attn_func",
    "stripe": "stripe_flash_attn_func",
    "basic": "ring_flash_attn_func",
}

add(
    "attention",
    Method(
        "torch-ring", partial(_torch, method="alltoall"), _torch_needs, ours=False,
        row={"method": "ring", "variant": "zigzag"},
    ),
    Method("torch-gather", partial(_torch, method="allgather"), _torch_needs, ours=False),
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
            partial(_ring_flash_attn, function=_FUNCTIONS[word], layout=layout),
            partial(_library_needs, packages=["ring-flash-attn"], full=word == "basic"),
            ours=False,
            row={"method": "ring", "variant": word},
        )
        for layout, word in VARIANTS.items()
    ),
    *(
        Method(
            f"yunchang-{word}-{heads}",
            partial(_yunchang, ring=word.removesuffix("e"), layout=layout, heads=heads),
            partial(_library_needs, packages=["yunchang"], full=word == "basic", heads=heads),
            ours=False,
            row={"method": "usp", "variant": word, "head_parallel": heads},
        )
        for layout, word in VARIANTS.items()
        for heads in (1, 2, 4, 8)
    ),
    Method("magi", _magi, _magi_needs, ours=False, row={"method": "magi-a2av"}),
)  # fmt: skip

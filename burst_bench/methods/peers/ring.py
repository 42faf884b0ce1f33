"""Torch's own ring attention: the templates below `context_parallel`, with the flash operators of a device.

`context_parallel` itself knows the operators of GPUs alone. Its templates take any operator, so that of the
CPU runs here over gloo; messages and merging are torch's. On a GPU this was never run.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from burst_bench.core import Method, World
from burst_bench.methods.sharded import Attention, RingCase, dealt, divisible
from burst_mcore.mask import Mask

aten = torch.ops.aten


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


def _torch(case: RingCase, world: World, method: str) -> Attention:
    causal = case.seen == Mask.causal()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = _RingAttention.apply(world.group, method, causal, *heads_first)  # type: ignore[no-untyped-call]
        return out.transpose(1, 2)

    return dealt("zigzag" if causal else "contiguous", world, attend)


def _needs(case: RingCase, device: str) -> str | None:
    if case.seen not in (Mask.causal(), Mask.full()):
        return f"a mask that is causal or full, got {case.mask}"
    if case.heads != case.kv_heads:
        return f"as many K/V heads as heads, got {case.kv_heads} and {case.heads}"
    if device == "cuda" and case.dtype == "float32":
        return "bfloat16 or float16, got float32"
    return divisible(case, device)


METHODS = (
    Method(
        "torch-ring", partial(_torch, method="alltoall"), _needs, ours=False,
        row={"method": "ring", "variant": "zigzag"},
    ),
    Method("torch-gather", partial(_torch, method="allgather"), _needs, ours=False),
)  # fmt: skip

"""A stack of transformer layers, and the ways to checkpoint them that are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from burst_mcore.attention.api import burst_attention
from burst_mcore.attention.operator import attention_forward
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.checkpointing import Full, KeepAttention, Policy, Segment, checkpoint
from burst_mcore.config import BurstConfig
from burst_mcore.explain.problem import DTYPES
from burst_mcore.mask import Mask

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Stack:
    """What is trained a step of. Raises ValueError where a field is not legal."""

    seq: int = 16384
    """Tokens in the global sequence, a batch of one."""
    hidden: int = 512
    heads: int = 8
    layers: int = 4
    layout: str = "striped"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("seq", "hidden", "heads", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.hidden % self.heads:
            raise ValueError(f"heads must divide hidden, got {self.heads} and {self.hidden}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")

    @property
    def words(self) -> str:
        """In a line."""
        return (
            f"{self.layers} layers, {self.seq} tokens, hidden size {self.hidden}, {self.heads} heads, "
            f"causal, {self.layout}, {self.dtype}"
        )


class Layer(nn.Module):
    """A layer as Llama has them: norms, attention, a gated MLP."""

    def __init__(self, stack: Stack, topology: Topology) -> None:
        super().__init__()
        hidden, dtype = stack.hidden, DTYPES[stack.dtype]
        linear = partial(nn.Linear, bias=False, dtype=dtype)
        self.heads, self.topology = stack.heads, topology
        self.mask, self.config = Mask.causal(), BurstConfig(layout=stack.layout)
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, dtype=dtype) for _ in range(2))
        self.qkv, self.out = linear(hidden, 3 * hidden), linear(hidden, hidden)
        self.up, self.down = linear(hidden, 8 * hidden // 3 * 2), linear(8 * hidden // 3, hidden)
        self.around_attention: Callable[..., Tensor] = _as_it_is

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = burst_attention(q, k, v, topology=self.topology, mask=self.mask, config=self.config)
        assert isinstance(out, Tensor)
        return out

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(self.around_attention(self.attend, q, k, v).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        out: Tensor = x + self.down(nn.functional.silu(gate) * up)
        return out


def _as_it_is(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return function(*args)


@dataclass(frozen=True)
class Method:
    """One way to checkpoint layers."""

    name: str
    layer: Callable[..., Tensor] = _as_it_is
    """Calls a layer, or something around it, on what it is given."""
    attention: Callable[..., Tensor] = _as_it_is
    """The same for attention alone."""
    policy: Policy | None = field(default=None, compare=False)
    """Of ours."""
    prepare: Callable[[], None] = lambda: None
    """In each process, before the first step."""
    needs: Callable[[], str | None] = lambda: None
    """What it lacks here, in words."""


def _ours(name: str, policy: Policy) -> Method:
    return Method(name, layer=partial(checkpoint, policy=policy), policy=policy)


def _selective(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Torch's selective activation checkpointing: matrix products and attention are kept."""
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, attention_forward._opoverload]
    contexts = partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, kept)
    out: Tensor = torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=contexts)
    return out


def _megatrons(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    from megatron.core import tensor_parallel

    out: Tensor = tensor_parallel.checkpoint(function, False, *args)
    return out


def _prepare_megatron() -> None:
    from megatron.core import tensor_parallel

    if not torch.cuda.is_available():
        from burst_mcore.megatron import cpu

        cpu.enable()
    tensor_parallel.get_cuda_rng_tracker()


def _megatron_needs() -> str | None:
    return None if find_spec("megatron") else "the package megatron-core"


SHARES = (0.25, 0.5, 0.75)
METHODS: Sequence[Method] = (
    Method("none"),
    _ours("full", Full()),
    *(_ours(f"segment {share:g}", Segment(share)) for share in SHARES),
    _ours("attention", KeepAttention()),
    Method("torch selective", layer=_selective),
    Method("megatron full", layer=_megatrons, prepare=_prepare_megatron, needs=_megatron_needs),
    Method("megatron selective", attention=_megatrons, prepare=_prepare_megatron, needs=_megatron_needs),
)
"""No recompute; our policies; torch's and Megatron's own: in the order of the table."""

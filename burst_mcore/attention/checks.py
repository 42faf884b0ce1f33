"""Validation of arguments: of one rank before any communication, and of all ranks' lengths after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd import forward_ad

from burst_mcore.attention.numerics.latent import Latent
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.config import BurstConfig
from burst_mcore.dtypes import DTYPES
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask
from burst_mcore.words import brief, is_finite

ROTATES = ("auto", "on", "off")
"""Values of `Latent.rotates`."""
TENSOR = "[batch, local sequence, heads, head_dim] without empty dimensions"


def check_tensors(q: Tensor, k: Tensor, v: Tensor, *, may_be_empty: bool) -> None:
    """Check shapes, dtypes and devices of q, k and v; may_be_empty: the rank may hold no token."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, x, TENSOR, may_be_empty)
    of_q, of_k, of_v, problem = q.shape, k.shape, v.shape, None
    if not of_q[:2] == of_k[:2] == of_v[:2]:
        problem = "q, k, v must have the same batch and local sequence"
    elif of_k[2] != of_v[2] or of_q[2] % of_k[2]:
        problem = "k and v must have the same number of heads, and it must divide that of q"
    elif of_q[3] != of_k[3]:
        problem = "q and k must have the same head_dim"
    if problem:
        raise ValueError(f"{problem}, got q {tuple(of_q)}, k {tuple(of_k)}, v {tuple(of_v)}")
    _check_alike("q, k, v", (q, k, v))


def check_latent(q: Tensor, k: Tensor, v: Tensor, up: Tensor, *, may_be_empty: bool) -> None:
    """Check that a latent fits q; k: [B, S, 1, R], v: [B, S, 1, Dr]."""
    _check_tensor("q", q, TENSOR, may_be_empty)
    for name, x, width in (("latent.compressed", k, "R"), ("latent.rope_key", v, "Dr")):
        shape = f"[batch, local sequence, 1, {width}] without empty dimensions"
        _check_tensor(name, x, shape, may_be_empty)
    check_dense("latent.weight", up)
    fits, problem = up.dim() == 3 and up.shape[:2] == (q.shape[2], k.shape[3]), None
    if not q.shape[:2] == k.shape[:2] == v.shape[:2] or k.shape[2] != 1 or v.shape[2] != 1:
        problem = (
            "q, latent.compressed [B, S, R] and latent.rope_key [B, S, 1, Dr] must have the same batch and "
            "local sequence"
        )
    elif not fits or not v.shape[3] < q.shape[3] or not up.shape[2] > q.shape[3] - v.shape[3]:
        problem = "latent.weight must be [heads of q, R, Dk + Dv] with Dk = head_dim - Dr"
    if problem:
        raise ValueError(
            f"{problem}, got q {list(q.shape)}, compressed {list(k.shape[:2] + k.shape[3:])}, rope_key "
            f"{list(v.shape)}, weight {list(up.shape)}"
        )
    _check_alike("q and the latent", (q, k, v, up))


def _check_tensor(name: str, x: Tensor, description: str, may_be_empty: bool) -> None:
    if isinstance(x, Tensor):
        check_dense(name, x)
    empty = isinstance(x, Tensor) and 0 in (x.shape[:1] + x.shape[2:] if may_be_empty else x.shape)
    if not isinstance(x, Tensor) or x.dim() != 4 or empty:
        actual = tuple(x.shape) if isinstance(x, Tensor) else brief(x)
        raise ValueError(f"{name} must be a tensor {description}, got {actual}")


def check_dense(name: str, x: Tensor) -> None:
    """Check that a tensor is dense (strided) and has no tangent."""
    if x.is_nested:
        raise ValueError(
            f"{name} is a nested tensor: give its sequences one after another, as one [1, all tokens, ...], "
            f"with mask=Mask.causal() & Mask.documents(offsets)"
        )
    if hasattr(x, "full_tensor"):  # without the import of torch.distributed.tensor
        raise ValueError(f"{name} is a DTensor: give the shard of this rank, {name}.to_local()")
    if x.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor (torch.strided), got {x.layout}")
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise ValueError(
            f"{name} has a tangent: burst_attention has no forward-mode derivative (torch.func.jvp, "
            f"forward_ad.make_dual); take gradients by backward"
        )


def _check_alike(names: str, tensors: Sequence[Tensor]) -> None:
    """Check that tensors share one device and one supported dtype."""
    if len({x.dtype for x in tensors}) > 1 or tensors[0].dtype not in DTYPES.values():
        raise ValueError(
            f"{names} must have one dtype, of {_joined(DTYPES.values())}; got "
            f"{_joined([x.dtype for x in tensors])}"
        )
    if len({x.device for x in tensors}) > 1:
        raise ValueError(f"{names} must be on one device, got {_joined([x.device for x in tensors])}")


def _joined(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Check that sinks are [heads of q], floating point, on the device of q."""
    if sinks is None:
        return
    if isinstance(sinks, Tensor):
        check_dense("sinks", sinks)
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point() or sinks.shape != q.shape[2:3]:
        actual = f"{tuple(sinks.shape)} of {sinks.dtype}" if isinstance(sinks, Tensor) else brief(sinks)
        raise ValueError(f"sinks must be a floating-point tensor [heads], here [{q.shape[2]}], got {actual}")
    if sinks.device != q.device:
        raise ValueError(f"sinks must be on the device of q, {q.device}, got {sinks.device}")


def check_settings(
    mask: Mask, config: BurstConfig, softmax_scale: float | None, softcap: float | None, rotates: str
) -> None:
    """Check the types of mask and config, and the values of numbers and options."""
    if not isinstance(config, BurstConfig):
        raise ValueError(f"config must be a BurstConfig, got {brief(config)}")
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a Mask, got {brief(mask)}: {_nearest(mask)}")
    if rotates not in ROTATES:
        raise ValueError(f"rotates must be one of {', '.join(map(repr, ROTATES))}, got {brief(rotates)}")
    for name, value in (("softmax_scale", softmax_scale), ("softcap", softcap)):
        if value is not None and not (is_finite(value) and value > 0):
            raise ValueError(f"{name} must be positive and finite, got {brief(value)}")


def _nearest(mask: object) -> str:
    if isinstance(mask, str) and mask in ("causal", "full"):
        return f"Mask.{mask}()"
    return "Mask.causal(), Mask.full(), Mask.window(left, right), Mask.documents(cu_seqlens), ..."


def no_topology(topology: object) -> ValueError:
    """Return the error of a call with a topology of another type."""
    return ValueError(
        f"topology must be a Topology, got {brief(topology)}: Topology.from_group(group), of a "
        f"DeviceMesh mesh.get_group(), or Topology.single()"
    )


def check_parts(latent: Latent) -> None:
    """Check that a latent has three tensors, with `compressed` [B, S, R]."""
    if not isinstance(latent, Latent) or not all(isinstance(x, Tensor) for x in latent[:3]):
        parts = latent[:3] if isinstance(latent, Latent) else (latent,)
        types = ", ".join(type(part).__name__ for part in parts)
        raise ValueError(f"latent must be a Latent(compressed, rope_key, weight) of tensors, got {types}")
    check_dense("latent.compressed", latent.compressed)
    if latent.compressed.dim() != 3:
        raise ValueError(
            f"latent.compressed must be [batch, local sequence, R], got {tuple(latent.compressed.shape)}"
        )


def check_group(topology: Topology, device: str) -> None:
    """Check that a ring has a process group for messages of tensors on this device."""
    groups, size = topology.communicators, topology.size
    if groups is None and size > 1:
        raise ValueError(f"a ring of {size} ranks needs its process group: Topology.from_group")
    backend = {"cpu": "cpu:gloo", "cuda": "cuda:nccl"}.get(device, "cpu or cuda tensors")
    if groups is not None and backend not in groups.backends:
        raise ValueError(f"{device} tensors need a process group with {backend}, got {groups.backends}")


@lru_cache(maxsize=1024)
def check_lengths(layout: Layout, lengths: tuple[int, ...]) -> None:
    """Check that the ranks' lengths are the lengths of the layout's shards."""
    n, size = sum(lengths), len(lengths)
    if n < 1:
        raise ValueError("the sequence is empty: no rank holds a token")
    rank, start, stop, step = layout.run_table(n, size).unbind(1)
    of_run = -((start - stop.clamp(max=n)) // step).clamp(max=0)
    legal = tuple(torch.zeros(size, dtype=torch.int64).index_add_(0, rank, of_run).tolist())
    if lengths != legal:
        raise ValueError(
            f"the ranks hold {_listed(lengths)} tokens, {n} in all, but layout {layout} on {size} ranks "
            f"shards them as {_listed(legal)}: use burst_mcore.shard(), or pad the sequence to a multiple of "
            f"{layout.divisor(size)} tokens"
        )


def _listed(lengths: Sequence[int]) -> str:
    return str(list(lengths)) if len(lengths) <= 16 else f"[{', '.join(map(str, lengths[:16]))}, ...]"

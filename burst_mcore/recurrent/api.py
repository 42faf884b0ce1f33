"""recurrence and convolution over sharded sequences, the public functions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from burst_mcore.dtypes import wide
from burst_mcore.recurrent.exchange import States, halo_of, resized, starts_of
from burst_mcore.recurrent.heads import by_heads
from burst_mcore.recurrent.kernels import Heads, Recurrence, Tensors
from burst_mcore.recurrent.sequence import Shards


def recurrence(kernel: Recurrence | Heads, tensors: Tensors, shards: Shards, way: str = "states") -> Tensor:
    """Return the outputs of this rank's tokens, as of a kernel that runs over each whole document from zero.

    Every rank of the topology calls it with its shard. Only ranks that share a document exchange states. By
    heads, each rank gets all tokens of its share of the heads, and all ranks exchange tokens.

    Args:
        kernel: the recurrence; a `Heads` has no state and always goes by heads.
        tensors: of this rank's tokens, along the dim of the kernel, in the order of the shard.
        shards: the sequence. By heads, of any layout.
        way: "states" or "heads", the same on all ranks.

    Raises:
        ValueError: the tensors do not hold this rank's tokens; the layout scatters neighbouring tokens, whose
            states would travel; the ranks do not divide the heads; or the kernel does not go by heads.
        RuntimeError: a rank has gone.
    """
    if way not in ("states", "heads"):
        raise ValueError(f"way must be 'states' or 'heads', got {way!r}")
    _check(tensors, kernel.dim, shards, kernel.name)
    with torch.autocast(tensors[0].device.type, enabled=False):  # states stay in float32
        if isinstance(kernel, Heads):
            return by_heads(kernel, tensors, shards)
        if way == "states":
            return _recurred(kernel, tensors, shards)
        if kernel.heads is None:
            raise ValueError(f"{kernel.name} does not go by heads: set heads=Heads(...), or way='states'")
        return by_heads(kernel.heads, tensors, shards)


def _recurred(kernel: Recurrence, tensors: Tensors, shards: Shards) -> Tensor:
    own = shards.own
    pieces = [kernel.cut(tensors, each.fragment.rows) for each in own]
    outs: list[Tensor | None] = [None] * len(own)
    decays, finals = [], []
    for number, (each, piece) in enumerate(zip(own, pieces, strict=True)):
        fragment = each.fragment
        if fragment.begins:
            outs[number], final = kernel.run(piece, None)
        elif not fragment.ends:
            _, final = kernel.run(piece, None)
            decays.append(kernel.decay(piece))
        if not fragment.ends:
            finals.append(final)
    starts: list[Tensor] = []
    tie: Tensor | None = None
    roots = (*tensors, *kernel.parameters)
    if any(shards.scan().programs):
        like = tensors[kernel.like]
        shapes = tuple(kernel.state_shape(tensors)), tuple(kernel.decay_shape(tensors))
        trains = any(x.requires_grad for x in (*decays, *finals, *roots))
        states = States(kernel.name, kernel.algebra, *shapes, wide(like.dtype), like.device, trains)
        decays, finals = ([x.to(states.dtype) for x in xs] for xs in (decays, finals))
        starts, tie = starts_of(shards, states, decays, finals, *roots)
        continuing = [number for number, each in enumerate(own) if not each.fragment.begins]
        for number, start in zip(continuing, starts, strict=True):
            outs[number], _ = kernel.run(pieces[number], start)
    if not own:  # all tensors stay in the graph: exchanges before this one await this rank's backward
        tie = torch.stack([x.sum().to(torch.float32) for x in (*roots, *([] if tie is None else [tie]))])
    out = torch.cat([x for x in outs if x is not None], kernel.dim) if own else tensors[kernel.like]
    return out if tie is None or starts else out + tie.sum().to(out.dtype)


def convolution(
    convolve: Callable[[Tensor], Tensor], x: Tensor, width: int, shards: Shards, dim: int
) -> Tensor:
    """Return a causal convolution of this rank's tokens, as of one that runs over each whole document.

    Args:
        convolve: a causal convolution along `dim`, which reads zeros before the first token, and the same
            number of tokens out. One call serves all fragments.
        x: this rank's tokens.
        width: tokens that an output reads, its own included.
        shards: the sequence.
        dim: the dimension of tokens.

    Raises:
        ValueError, RuntimeError: as `recurrence`.
    """
    _check((x,), dim, shards, "convolution")
    own, reach = shards.own, width - 1
    if own and (reach == 0 or len(own) == shards.topology.size == 1):
        return convolve(x)
    some = any(shards.halo(reach).programs)
    halo = halo_of(x, dim, shards, reach) if some else x.new_zeros(resized(x, dim, reach * len(own)))
    if not own:
        return x + halo.sum().to(x.dtype)
    parts, kept, start = [], [], 0
    for number, each in enumerate(own):
        rows = each.fragment.rows
        parts += [halo.narrow(dim, number * reach, reach), x.narrow(dim, rows.start, len(rows))]
        kept.append(range(start + reach, start := start + reach + len(rows)))
    out = convolve(torch.cat(parts, dim))
    return torch.cat([out.narrow(dim, rows.start, len(rows)) for rows in kept], dim)


def _check(tensors: Tensors, dim: int, shards: Shards, name: str) -> None:
    rank, size = shards.topology.rank, shards.topology.size
    padded, n = shards.layout.runs(shards.tokens, rank, size), shards.tokens
    tokens = sum(len(range(run.start, min(run.stop, n), run.step)) for run in padded)
    wrong = [tuple(x.shape) for x in tensors if x.shape[dim] != tokens]
    if wrong:
        raise ValueError(
            f"{name}: layout {shards.layout} deals rank {rank} {tokens} of {shards.tokens} "
            f"tokens, along dimension {dim}, got tensors {wrong}"
        )

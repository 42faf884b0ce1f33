"""recurrence and convolution over sharded sequences, the public functions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from burst_mcore.recurrent.exchange import halo_of, resized, scanned
from burst_mcore.recurrent.kernels import Recurrence, Tensors
from burst_mcore.recurrent.runs import Runs
from burst_mcore.recurrent.sequence import Shards


def recurrence(kernel: Recurrence, tensors: Tensors, shards: Shards) -> Tensor:
    """Return the outputs of this rank's tokens: equal to the kernel's over each whole document from zero.

    Every rank of the topology calls it with its shard. Only ranks that share a document exchange states. An
    error of one rank reaches all ranks, unless no rank exchanges.

    Args:
        tensors: of this rank's tokens, along the dim of the kernel, in the order of the shard.

    Raises:
        ValueError: the tensors do not hold this rank's tokens; the layout separates neighbouring tokens, so
            that a state would be sent for each token; another rank's call is illegal.
        RuntimeError: a rank has gone, or failed after the exchange.
    """
    agreement = shards.agreement(shards.scan)
    with agreement.refusing():
        _check(tensors, kernel.dim, shards, kernel.name)
        runs = Runs(kernel, tensors, shards)
    with torch.autocast(runs.like.device.type, enabled=False):  # states stay in float32
        with agreement.refusing():
            outs = runs.from_zero()
            if not any(shards.scan().programs):
                return torch.cat(outs, kernel.dim)
            states, maps = runs.states(), runs.maps()
        starts = scanned(shards, states, maps, backward=False)
        with agreement.ring():  # the other ranks are in later calls by then
            return runs.outputs(outs, states, maps, starts)


def convolution(
    convolve: Callable[[Tensor], Tensor], x: Tensor, width: int, shards: Shards, dim: int
) -> Tensor:
    """Return a causal convolution of this rank's tokens: equal to the convolution of each whole document.

    Args:
        convolve: a causal convolution along `dim`, with zeros before the first token, and as many tokens out
            as in. One call computes all fragments.
        x: this rank's tokens.
        width: the tokens that an output reads, its own included.

    Raises:
        ValueError, RuntimeError: as `recurrence`.
    """
    agreement = shards.agreement(lambda: shards.halo(width - 1))
    with agreement.refusing():
        _check((x,), dim, shards, "convolution")
        pieces, reach = shards.own, width - 1
        if pieces and (reach == 0 or len(pieces) == shards.topology.size == 1):
            return convolve(x)
        exchanges = any(shards.halo(reach).programs)
    halo = halo_of(x, dim, shards, reach) if exchanges else x.new_zeros(resized(x, dim, reach * len(pieces)))
    with agreement.ring():  # the other ranks are in later calls by then
        if not pieces:
            return x + halo.sum().to(x.dtype)
        lengths = [len(each.fragment.rows) for each in pieces]
        pairs = zip(halo.split(reach, dim), x.split(lengths, dim), strict=True)
        outs = convolve(torch.cat([part for pair in pairs for part in pair], dim))
        return torch.cat(outs.split([n for length in lengths for n in (reach, length)], dim)[1::2], dim)


def _check(tensors: Tensors, dim: int, shards: Shards, name: str) -> None:
    tokens = sum(len(each.fragment.rows) for each in shards.own)
    shapes = [tuple(x.shape) for x in tensors if x.shape[dim] != tokens]
    if shapes:
        raise ValueError(
            f"{name}: layout {shards.layout} shards rank {shards.topology.rank} {tokens} of {shards.tokens} "
            f"tokens, along dimension {dim}, got tensors {shapes}"
        )

"""Ranks of a sequence as threads over mailboxes: exchanges without processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from ranks import Mailboxes, MailboxTransport, threads

from burst_mcore import Layout, Topology, shard, unshard
from burst_mcore.recurrent import Shards


@dataclass(frozen=True)
class Played(Shards):
    """Shards whose messages go over mailboxes, and which note what the ranks would agree on."""

    carrier: Any = None
    agreed: Any = None

    @contextlib.contextmanager
    def exchanging(self, signature: Any) -> Iterator[Any]:
        self.agreed.append(signature)
        yield self.carrier


def played(layout: Layout | str, tokens: int, size: int, ends: tuple[int, ...] = (), intra: int = 0):
    """The shards of all ranks."""
    mail = Mailboxes()
    return [
        Played(
            Topology(rank, size, intra),
            Layout.of(layout),
            tokens,
            ends,
            carrier=MailboxTransport(mail, rank),
            agreed=[],
        )
        for rank in range(size)
    ]


def sharded(function, tensors, gradient, everyone, dim: int = 1, parameters=()):
    """(output, gradients of the tensors) of function(own tensors, shards), of the whole sequence.

    Gradients of parameters follow, summed over the ranks.
    """

    def rank(r: int):
        shards = everyone[r]
        how = {"rank": r, "size": len(everyone), "layout": shards.layout}
        own = tuple(shard(x, dim, **how).detach().requires_grad_() for x in tensors)
        out = function(own, shards)
        leaves, of_own = (*own, *parameters), shard(gradient, dim, **how)
        return out, *torch.autograd.grad(out, leaves, of_own, materialize_grads=True)

    parts = [*zip(*threads(len(everyone), rank), strict=True)]
    of_shards, of_parameters = parts[: 1 + len(tensors)], parts[1 + len(tensors) :]
    whole = [unshard([x.detach() for x in part], dim, layout=everyone[0].layout) for part in of_shards]
    whole += [sum(part) for part in of_parameters]
    agreed = [shards.agreed for shards in everyone]
    assert all(each == agreed[0] for each in agreed), "the ranks make different exchanges"
    return whole


def alone(function, tensors, gradient, ends, dim: int = 1, parameters=()):
    """The same of function(tensors of one document), each document by itself."""
    own = [x.detach().requires_grad_() for x in tensors]
    outs = [
        function(tuple(x.narrow(dim, start, stop - start) for x in own))
        for start, stop in pairwise(ends)
        if stop > start
    ]
    out = torch.cat(outs, dim)
    return [out.detach(), *torch.autograd.grad(out, [*own, *parameters], gradient, materialize_grads=True)]


def error(found, want) -> float:
    """The largest difference of any tensor, relative to its largest entry."""
    return max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in zip(found, want, strict=True)
    )

"""recurrence and convolution over sharded sequences, the public functions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from burst_mcore.dtypes import wide
from burst_mcore.recurrent.exchange import Kept, Passed, States, halo_of, resized, scanned
from burst_mcore.recurrent.heads import by_heads
from burst_mcore.recurrent.kernels import Heads, Recurrence, Tensors
from burst_mcore.recurrent.maps import Map
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
        if way == "states" and isinstance(kernel, Recurrence):
            return _recurred(kernel, tensors, shards)
        heads = kernel.heads if isinstance(kernel, Recurrence) else kernel
        if heads is None:
            raise ValueError(f"{kernel.name} does not go by heads: set heads=Heads(...), or way='states'")
        return by_heads(heads, tensors, shards)


def _recurred(kernel: Recurrence, tensors: Tensors, shards: Shards) -> Tensor:
    own, like, roots = shards.own, tensors[kernel.like], (*tensors, *kernel.parameters)
    rows = {each: (each.fragment.row, len(each.fragment.rows)) for each in own}
    pieces = {each: tuple(x.narrow(kernel.dim, *rows[each]) for x in tensors) for each in own}
    runs = {each: kernel.run(pieces[each], None) for each in own if each.fragment.begins}
    outs = [out for out, _ in runs.values()]
    if not own:  # all tensors stay in the graph: exchanges before this one await this rank's backward
        outs = [like + torch.stack([x.sum().to(torch.float32) for x in roots]).sum().to(like.dtype)]
    if not any(shards.scan().programs):
        return torch.cat(outs, kernel.dim)
    begin, end = [each for each in runs if each.last], [each for each in own if 0 < each.place == each.last]
    middle, dtype = [each for each in own if 0 < each.place < each.last], wide(like.dtype)
    # The scan finds the state before each other fragment. Its maps have no graph: see `Passed`.
    maps = {each: Map(None, runs[each][1].detach().to(dtype)) for each in begin}
    with torch.no_grad():
        for each in middle:
            decay, (_, state) = kernel.decay(pieces[each]), kernel.run(pieces[each], None)
            maps[each] = Map(decay.to(dtype), state.to(dtype))
        shapes = tuple(kernel.state_shape(tensors)), tuple(kernel.decay_shape(tensors))
        trains = any(x.requires_grad for x in (*roots, *(runs[each][1] for each in begin)))
        states = States(kernel.name, kernel.algebra, *shapes, dtype, like.device, trains)
        starts = scanned(shards, states, maps, backward=False)
    # Fragments in the middle run from their states, which get gradients by a sum with a zero.
    kept, zero = Kept(), like.new_zeros((), dtype=dtype, requires_grad=trains)
    before = [starts[each] + zero for each in middle]
    with saved_tensors_hooks(kept.pack, lambda box: box.tensor):
        runs |= {each: kernel.run(pieces[each], x) for each, x in zip(middle, before, strict=True)}
    # Behind `Passed`, which brings states' gradients, fragments run that end a document. Clones are no views.
    passed = *(runs[each][0] for each in middle), *(starts[each] for each in end), *outs
    behind, decays = (runs[each][1] for each in (*middle, *begin)), [maps[each].decay for each in middle]
    of, tensors = (shards, states, kept, begin, middle, end), (*passed, *before, *behind, *roots)
    passed = Passed.apply(of, decays, len(passed), *tensors)  # type: ignore[no-untyped-call]
    done = dict(zip((*middle, *end, *runs), passed, strict=False))  # `runs` lists begins first
    done |= {each: kernel.run(pieces[each], done[each].clone())[0] for each in end}
    return torch.cat([done[each] for each in own], kernel.dim) if own else passed[0].clone()


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
    lengths = [len(each.fragment.rows) for each in own]
    pairs = zip(halo.split(reach, dim), x.split(lengths, dim), strict=True)
    outs = convolve(torch.cat([part for pair in pairs for part in pair], dim))
    return torch.cat(outs.split([n for length in lengths for n in (reach, length)], dim)[1::2], dim)


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

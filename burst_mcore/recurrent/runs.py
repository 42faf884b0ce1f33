"""The runs of a kernel over the fragments of one rank, and the outputs of its shard that they make.

Over a fragment a state S becomes A S + B. A fragment that begins its document runs from zero, before the
scan; each other one runs behind the scan, from the state that it finds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from burst_mcore.dtypes import wide
from burst_mcore.recurrent.exchange import Kept, Passed, States
from burst_mcore.recurrent.kernels import Recurrence, Tensors
from burst_mcore.recurrent.maps import Map
from burst_mcore.recurrent.sequence import Own, Shards


@dataclass
class Runs:
    """The runs of one call on this rank."""

    kernel: Recurrence
    tensors: Tensors
    """Of this rank's tokens."""
    shards: Shards
    ran: dict[Own, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By fragment, the outputs of its run and the state behind it."""

    def __post_init__(self) -> None:
        own = self.shards.own
        self.like = self.tensors[self.kernel.like]
        self.roots = *self.tensors, *self.kernel.parameters
        self.begin = [each for each in own if each.fragment.begins]
        self.continued = [each for each in self.begin if each.last]
        """The fragments that begin a document and do not end it."""
        self.middle = [each for each in own if 0 < each.place < each.last]
        self.end = [each for each in own if 0 < each.place == each.last]

    def from_zero(self) -> list[Tensor]:
        """Run over the fragments that begin a document; return their outputs, on no tokens an empty one."""
        self.ran = {each: self._run(each, None) for each in self.begin}
        if self.shards.own:
            return [self.ran[each][0] for each in self.begin]
        # All tensors stay in the graph: exchanges before this one await this rank's backward.
        total = torch.stack([x.sum().to(torch.float32) for x in self.roots]).sum()
        return [self.like + total.to(self.like.dtype)]

    def states(self) -> States:
        """Return the description of the states that the ranks exchange."""
        kernel, like = self.kernel, self.like
        shapes = tuple(kernel.state_shape(self.tensors)), tuple(kernel.decay_shape(self.tensors))
        trained = (*self.roots, *(self.ran[each][1] for each in self.continued))
        gradients = torch.is_grad_enabled() and any(x.requires_grad for x in trained)
        return States(kernel.name, kernel.algebra, *shapes, wide(like.dtype), like.device, gradients)

    @torch.no_grad()
    def maps(self) -> dict[Own, Map]:
        """Return S -> A S + B of the fragments that are continued, without a graph: see `Passed`."""
        dtype = wide(self.like.dtype)
        maps = {each: Map(None, self.ran[each][1].detach().to(dtype)) for each in self.continued}
        for each in self.middle:
            decay, (_, state) = self.kernel.decay(self._tokens(each)), self._run(each, None)
            maps[each] = Map(decay.to(dtype), state.to(dtype))
        return maps

    def outputs(
        self, outs: list[Tensor], states: States, maps: dict[Own, Map], starts: dict[Own, Tensor]
    ) -> Tensor:
        """Return the outputs of all fragments; outs: those from zero, starts: the states before the others.

        The ends run behind `Passed`, so that its backward has the gradients of the states before them.
        """
        kept = Kept()
        before = self._from_states(states, starts, kept)
        passed = self._passed(outs, before, states, maps, starts, kept)
        if not self.shards.own:
            return passed[0].clone()  # no view, which may not be written over
        done = dict(zip((*self.middle, *self.end, *self.begin), passed, strict=True))
        done |= {each: self._run(each, done[each].clone())[0] for each in self.end}
        return torch.cat([done[each] for each in self.shards.own], self.kernel.dim)

    def _from_states(self, states: States, starts: dict[Own, Tensor], kept: Kept) -> list[Tensor]:
        """Run over the fragments in the middle, and return the states before them.

        To each is added a zero that needs a gradient, so that backward can ask for the state's.
        """
        zero = self.like.new_zeros((), dtype=states.dtype, requires_grad=states.gradients)
        before = [starts[each] + zero for each in self.middle]
        with saved_tensors_hooks(kept.pack, lambda box: box.tensor):
            self.ran |= {each: self._run(each, x) for each, x in zip(self.middle, before, strict=True)}
        return before

    def _passed(
        self,
        outs: list[Tensor],
        before: list[Tensor],
        states: States,
        maps: dict[Own, Map],
        starts: dict[Own, Tensor],
        kept: Kept,
    ) -> tuple[Tensor, ...]:
        """Return outputs of the middle, states before the ends, and outputs from zero, through `Passed`."""
        passed = *(self.ran[each][0] for each in self.middle), *(starts[each] for each in self.end), *outs
        behind = [self.ran[each][1] for each in (*self.middle, *self.continued)]
        decays = [maps[each].decay for each in self.middle]
        of = self.shards, states, kept, self.continued, self.middle, self.end
        tensors = *passed, *before, *behind, *self.roots
        return Passed.apply(of, decays, len(passed), *tensors)  # type: ignore[no-any-return, no-untyped-call]

    def _run(self, each: Own, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return a fragment's outputs and the state behind it, A S + B of the state S before it."""
        return self.kernel.run(self._tokens(each), state)

    def _tokens(self, each: Own) -> Tensors:
        rows = each.fragment.rows
        return tuple(x.narrow(self.kernel.dim, rows.start, len(rows)) for x in self.tensors)

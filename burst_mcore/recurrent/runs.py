"""The kernel calls over the fragments of one rank, and the outputs of its shard.

A fragment is an affine map S -> A S + B of the state. The first fragment of a document is computed from zero,
before the scan; the other fragments are computed after the scan, from the state that it returns.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from burst_mcore.dtypes import wide
from burst_mcore.recurrent.exchange import Passed, SavedInputs, States
from burst_mcore.recurrent.kernels import Recurrence, Tensors
from burst_mcore.recurrent.maps import Map
from burst_mcore.recurrent.sequence import Own, Shards


@dataclass
class Runs:
    """The kernel calls of one recurrence on this rank."""

    kernel: Recurrence
    tensors: Tensors
    """The tensors of this rank's tokens."""
    shards: Shards
    ran: dict[Own, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """The outputs and the last state of each fragment."""

    def __post_init__(self) -> None:
        fragments = self.shards.own
        self.like = self.tensors[self.kernel.like]
        self.roots = *self.tensors, *self.kernel.parameters
        self.begin = [each for each in fragments if each.fragment.begins]
        self.continued = [each for each in self.begin if each.last]
        """The fragments at the start of a document that another fragment continues."""
        self.middle = [each for each in fragments if 0 < each.place < each.last]
        self.end = [each for each in fragments if 0 < each.place == each.last]

    def from_zero(self) -> list[Tensor]:
        """Compute the first fragments of documents; return their outputs, without tokens an empty output."""
        self.ran = {each: self._run(each, None) for each in self.begin}
        if self.shards.own:
            return [self.ran[each][0] for each in self.begin]
        # All tensors stay in the graph: earlier exchanges wait for this rank in backward.
        total = torch.stack([x.sum().to(torch.float32) for x in self.roots]).sum()
        return [self.like + total.to(self.like.dtype)]

    def states(self) -> States:
        """Return the description of the states that the ranks exchange."""
        kernel, like = self.kernel, self.like
        shapes = tuple(kernel.state_shape(self.tensors)), tuple(kernel.decay_shape(self.tensors))
        sources = (*self.roots, *(self.ran[each][1] for each in self.continued))
        gradients = torch.is_grad_enabled() and any(x.requires_grad for x in sources)
        return States(kernel.name, kernel.algebra, *shapes, wide(like.dtype), like.device, gradients)

    @torch.no_grad()
    def maps(self) -> dict[Own, Map]:
        """Return the maps S -> A S + B of fragments that another continues, without a graph: see `Passed`."""
        dtype = wide(self.like.dtype)
        maps = {each: Map(None, self.ran[each][1].detach().to(dtype)) for each in self.continued}
        for each in self.middle:
            decay, (_, state) = self.kernel.decay(self._tokens(each)), self._run(each, None)
            maps[each] = Map(decay.to(dtype), state.to(dtype))
        return maps

    def outputs(
        self, outs: list[Tensor], states: States, maps: dict[Own, Map], starts: dict[Own, Tensor]
    ) -> Tensor:
        """Return the outputs of all fragments; outs: from zero, starts: states before the other fragments.

        The last fragments run after `Passed`, whose backward needs the gradients of the states before them.
        """
        # A zero that requires a gradient lets backward compute the gradients of the states before the middle.
        zero = self.like.new_zeros((), dtype=states.dtype, requires_grad=states.gradients)
        before = [starts[each] + zero for each in self.middle]
        inputs = SavedInputs()
        with saved_tensors_hooks(inputs.pack, lambda box: box.tensor):
            self.ran |= {each: self._run(each, x) for each, x in zip(self.middle, before, strict=True)}
        results = *(self.ran[each][0] for each in self.middle), *(starts[each] for each in self.end), *outs
        last_states = [self.ran[each][1] for each in (*self.middle, *self.continued)]
        of = self.shards, states, inputs, self.continued, self.middle, self.end
        decays = [maps[each].decay for each in self.middle]
        tensors = *results, *before, *last_states, *self.roots
        passed: tuple[Tensor, ...] = Passed.apply(of, decays, len(results), *tensors)  # type: ignore[no-untyped-call]
        if not self.shards.own:
            return passed[0].clone()  # not a view, so that callers may write to it
        outputs = dict(zip((*self.middle, *self.end, *self.begin), passed, strict=True))
        outputs |= {each: self._run(each, outputs[each].clone())[0] for each in self.end}
        return torch.cat([outputs[each] for each in self.shards.own], self.kernel.dim)

    def _run(self, each: Own, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return a fragment's outputs and its last state, A S + B of the initial state S."""
        return self.kernel.run(self._tokens(each), state)

    def _tokens(self, each: Own) -> Tensors:
        rows = each.fragment.rows
        return tuple(x.narrow(self.kernel.dim, rows.start, len(rows)) for x in self.tensors)

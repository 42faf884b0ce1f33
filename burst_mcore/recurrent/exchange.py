"""The execution of scans and halos, with gradients, sent in the opposite direction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from burst_mcore.agreement.claims import Signature
from burst_mcore.attention.agree import agreement_of
from burst_mcore.attention.runtime.executor import Buffer, Transport
from burst_mcore.attention.schedule.actions import Recv, Send, Wait
from burst_mcore.recurrent.halo import turned
from burst_mcore.recurrent.maps import Algebra, Map
from burst_mcore.recurrent.programs import Action, Compose, Copy, Program, Span
from burst_mcore.recurrent.sequence import Own, Shards


@dataclass(frozen=True)
class States:
    """The states of one recurrence: the algebra of their maps, and their shapes and dtype."""

    name: str
    algebra: Algebra
    state_shape: tuple[int, ...]
    decay_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    gradients: bool
    """Whether the states require gradients: all ranks take part in backward, or none."""

    def room(self, span: Span) -> Map:
        """Return uninitialised room for the map over a span."""
        decay = None if span.is_state else torch.empty(self.decay_shape, dtype=self.dtype, device=self.device)
        return Map(decay, torch.empty(self.state_shape, dtype=self.dtype, device=self.device))

    def signature(self, pass_: str) -> Signature:
        """Return the properties that the ranks must have in common."""
        shapes = f"state {self.state_shape}, decay {self.decay_shape}, {self.dtype}"
        properties = {"recurrence": self.name, "shapes": shapes, "gradient wanted": str(self.gradients)}
        return {"pass": f"{pass_} of states", **properties}


class _Box:
    tensor: Tensor  # a saved tensor, alive as long as the graph holds the box


class SavedInputs:
    """The tensors that kernel calls save for backward, saved by `Passed`, which runs their backward first.

    Reading saved tensors twice would recompute a checkpoint, and communicate, twice.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._boxes = WeakValueDictionary[int, _Box]()

    def pack(self, x: Tensor) -> _Box:
        """Take a tensor that a kernel call saves."""
        box = self._boxes[len(self.tensors)] = _Box()
        self.tensors.append(x)
        return box

    def fill(self, saved: Sequence[Tensor]) -> None:
        for number, box in self._boxes.items():
            box.tensor = saved[number]

    def ahead(self, saved: Sequence[Tensor], *ends: Any) -> Buffer:
        """Run the kernels' backward, keeping the graph; ends: outputs, initial states, upstream gradients."""
        through = partial(torch.autograd.grad, *ends, retain_graph=True)
        self.fill(saved)
        try:
            return through()
        except RuntimeError as error:
            if "donated buffer" not in str(error):
                raise
        self.fill([x.clone() for x in saved])  # a compiled kernel's backward writes into its buffers
        with torch._functorch.config.patch(donated_buffer=False):
            gradients = through()
        self.fill(saved)
        return gradients


class Passed(torch.autograd.Function):
    """The identity on outputs and states; its backward gives last states of fragments their gradients.

    With S the state before a fragment and S' its last state: dS = A^T dS' + dS_outputs. A backward through
    the fragment computes dS_outputs, the scan dS' for all fragments; then autograd computes all gradients of
    the fragment. So A and B need no graph.
    """

    @staticmethod
    def forward(ctx: Any, of: tuple[Any, ...], decays: Buffer, many: int, *tensors: Tensor) -> Buffer:
        """Return the first `many` of the tensors.

        of: shards, states, saved inputs, fragments: that begin, are in the middle, end. tensors: outputs of
        the middle, states before ends, others; states before the middle, behind it, and beginnings; roots.
        """
        ctx.of, inputs = of, of[2]
        # Every rank saves some tensor, so that in a checkpoint all recompute before the backward exchange.
        ctx.save_for_backward(torch.empty(0), *decays, *inputs.tensors)
        inputs.tensors.clear()
        return tensors[:many]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        shards, states, inputs, begin, middle, end = ctx.of
        edges, many, n = [GradientEdge(*edge) for edge in ctx.next_functions], len(gradients), len(middle)
        # Read once, as torch's checkpoints demand: here they rerun the caller's forward, with its exchanges.
        _, *saved = ctx.saved_tensors
        with torch.autocast(states.device.type, enabled=False):  # as in forward: see `recurrence`
            with agreement_of(shards.topology).refusing():
                _refuse_second_derivatives()
                ends = edges[:n], edges[many : many + n], gradients[:n]
                of_middle = inputs.ahead(saved[n:], *ends) if n else ()
                of_starts = (x.to(states.dtype) for x in (*of_middle, *gradients[n : n + len(end)]))
                decays = *map(states.algebra.turned, saved[:n]), *[None] * len(end)
                maps = dict(zip((*middle, *end), map(Map, decays, of_starts), strict=True))
            behind = scanned(shards, states, maps, backward=True)
        of_tensors = *gradients, *[None] * n, *(behind[each] for each in (*middle, *begin))
        return *[None] * 3, *of_tensors, *[None] * (len(ctx.needs_input_grad) - 3 - len(of_tensors))


def _refuse_second_derivatives() -> None:
    if torch.is_grad_enabled():  # only with create_graph: torch would drop terms silently
        raise RuntimeError("recurrences and convolutions over shards have no second derivative")


@torch.no_grad()
def scanned(shards: Shards, states: States, maps: dict[Own, Map], *, backward: bool) -> dict[Own, Tensor]:
    """Return the states before those of this rank's fragments that continue a document.

    maps: of its fragments with a successor. `backward`: gradients, in the order from the last fragment.
    """
    program = shards.scan(backward=backward).programs[shards.topology.rank]
    places = {each: each.last - each.place if backward else each.place for each in shards.own}
    spans = {Span(each.chain, places[each], places[each] + 1): value for each, value in maps.items()}
    signature = states.signature("backward" if backward else "forward")

    def block(action: Send | Recv) -> Buffer:
        span = Span.of(action.buffer)
        if isinstance(action, Recv):
            spans[span] = states.room(span)
        decay, state = spans[span]
        return tuple(x.contiguous() for x in ((state,) if span.is_state else (state, decay)) if x is not None)

    with shards.exchanging(signature) as transport:
        for action in _posted(program, transport, block):
            assert isinstance(action, Compose)
            spans[action.span] = states.algebra.composed(spans[action.later], spans[action.earlier])
    return {each: spans[Span(each.chain, 0, place)].state for each, place in places.items() if place}


def _posted(
    program: Program, transport: Transport, block: Callable[[Send | Recv], Buffer]
) -> Iterator[Action]:
    """Post the messages of a program and wait for them; yield its other actions in order."""
    messages: list[tuple[Send | Recv, Buffer]] = []
    for action in program:
        if isinstance(action, (Send, Recv)):
            messages.append((action, block(action)))
        elif isinstance(action, Wait):
            try:
                for work in transport.post(action.channel, messages):
                    work.wait()
            except RuntimeError as error:
                peers = sorted({message.peer for message, _ in messages})
                raise RuntimeError(
                    f"an exchange of states or tokens: the {action.channel} messages of step {action.step} "
                    f"with ranks {peers} failed: a rank is gone or late; see the ranks' first error ({error})"
                ) from error
            messages = []
        else:
            yield action


@dataclass(frozen=True)
class Halo:
    """The exchange of a halo along `dim`: rows from shards to halos, gradients from halos to shards."""

    shards: Shards
    dim: int
    reach: int
    """Rows before each fragment."""
    gradients: bool
    """Whether autograd records the exchange: all ranks take part in backward, or none."""

    def carried(self, x: Tensor, rows: int, *, backward: bool) -> Tensor:
        """Return `rows` rows: the halo, zero-filled; or `backward` the gradient of the shard."""
        dim, parts = self.dim, list[tuple[range, Tensor]]()
        program = self.shards.halo(self.reach).programs[self.shards.topology.rank]

        def block(action: Send | Recv) -> Buffer:
            assert action.rows is not None
            if isinstance(action, Send):
                return (torch.cat([_part(x, dim, each) for each in action.rows], dim).contiguous(),)
            lengths = [*map(len, action.rows)]
            room = x.new_empty(resized(x, dim, sum(lengths)))
            parts.extend(zip(action.rows, room.split(lengths, dim), strict=True))
            return (room,)

        signature = {
            "pass": f"{'backward' if backward else 'forward'} of a halo of {self.reach} rows",
            "shape": f"{resized(x, dim, -1)} {x.dtype}",
            "gradient wanted": str(self.gradients),
        }
        with self.shards.exchanging(signature) as transport:
            for action in _posted(turned(program) if backward else program, transport, block):
                assert isinstance(action, Copy)
                parts.append((action.into, _part(x, dim, action.rows)))
        out = x.new_zeros(resized(x, dim, rows))
        for into, part in parts:
            _part(out, dim, into).add_(part)
        return out


class _MovedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, halo: Halo, x: Tensor) -> Tensor:
        ctx.halo, ctx.rows = halo, x.shape[halo.dim]
        ctx.save_for_backward(torch.empty(0))  # as `Passed`: in a checkpoint all ranks recompute
        return halo.carried(x, halo.reach * len(halo.shards.own), backward=False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        assert ctx.saved_tensors  # a checkpoint reruns the caller's forward here, with its exchanges
        with agreement_of(ctx.halo.shards.topology).refusing():
            _refuse_second_derivatives()
        return None, ctx.halo.carried(gradient, ctx.rows, backward=True)


def halo_of(x: Tensor, dim: int, shards: Shards, reach: int) -> Tensor:
    """Return the halo of this rank: along `dim`, `reach` rows of their document before each fragment."""
    halo = Halo(shards, dim, reach, torch.is_grad_enabled() and x.requires_grad)
    return _MovedRows.apply(halo, x)  # type: ignore[no-any-return, no-untyped-call]


def _part(x: Tensor, dim: int, rows: range) -> Tensor:
    return x[(*[slice(None)] * (dim % x.dim()), slice(rows.start, rows.stop, rows.step))]


def resized(x: Tensor, dim: int, rows: int) -> list[int]:
    """Return the shape of a tensor with `rows` along `dim`."""
    shape = list(x.shape)
    shape[dim] = rows
    return shape

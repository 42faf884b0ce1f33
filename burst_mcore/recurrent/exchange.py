"""Runs the programs of scans and of rows, with gradients: the same messages the other way round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from burst_mcore.agreement import Signature
from burst_mcore.attention.runtime.executor import Bundle, Transport
from burst_mcore.attention.schedule.actions import Recv, Send, Wait
from burst_mcore.dtypes import wide
from burst_mcore.recurrent.halo import turned
from burst_mcore.recurrent.maps import Algebra, Map
from burst_mcore.recurrent.programs import Action, Compose, Copy, Program, Span
from burst_mcore.recurrent.sequence import Own, Shards


@dataclass(frozen=True)
class States:
    """The states of one recurrence: what their maps are, and their shapes and dtype."""

    name: str
    algebra: Algebra
    state_shape: tuple[int, ...]
    decay_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    gradients: bool
    """Whether something that makes them needs gradients: all ranks take part in backward, or none."""

    def room(self, span: Span) -> Map:
        """Return uninitialised room for the map over a span."""
        state, decay = (
            torch.empty(shape, dtype=self.dtype, device=self.device)
            for shape in (self.state_shape, self.decay_shape)
        )
        return Map(None if span.is_state else decay, state)

    def signature(self, pass_: str) -> Signature:
        """Return what the ranks must have in common."""
        shapes = f"state {self.state_shape}, decay {self.decay_shape}, {self.dtype}"
        own = {"recurrence": self.name, "shapes": shapes, "needs gradients": str(self.gradients)}
        return {"pass": f"{pass_} of states", **own}


def starts_of(
    shards: Shards, states: States, decays: Sequence[Tensor], finals: Sequence[Tensor], *roots: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Return the states before those fragments of this rank that continue a document, and an anchor.

    The anchor has no elements. It ties the exchange into the graph of a rank that continues no document.

    Args:
        decays: A of each fragment that continues a document and is continued, in the order of the shard.
        finals: B of each fragment that is continued.
        roots: all tensors that states are made of: if one needs a gradient, all ranks take part in backward.
    """
    *starts, anchor = _Scan.apply(shards, states, len(decays), *decays, *finals, *roots)  # type: ignore[no-untyped-call]
    return starts, anchor


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shards: Shards, states: States, many: int, *maps: Tensor) -> tuple[Tensor, ...]:
        decays, finals = iter(maps[:many]), iter(maps[many:])
        own = [each for each in shards.own if each.last]
        held = {
            _span(each): Map(None if each.fragment.begins else next(decays), next(finals))
            for each in own
            if not each.fragment.ends
        }
        played = _play_scan(shards, states, held, backward=False)
        starts = [played[Span(each.chain, 0, each.place)].state for each in own if not each.fragment.begins]
        ctx.shards, ctx.states, ctx.many, ctx.own = shards, states, many, tuple(own)
        # All ranks save some tensor: in a checkpoint all recompute before they meet in backward.
        ctx.save_for_backward(torch.empty(0), *maps[:many], *starts)
        return (*(start.clone() for start in starts), torch.empty(0, device=states.device))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        algebra, own = ctx.states.algebra, ctx.own
        _, *saved = ctx.saved_tensors  # once: torch's checkpoints allow no more
        decays, starts = saved[: ctx.many], saved[ctx.many :]
        of_decay = iter(decays)
        decay_of = {e: next(of_decay) for e in own if not (e.fragment.begins or e.fragment.ends)}
        continuing = [each for each in own if not each.fragment.begins]
        held = {
            _span(each, backward=True): Map(
                algebra.turned(decay_of[each]) if each in decay_of else None, gradient.to(ctx.states.dtype)
            )
            for each, gradient in zip(continuing, gradients, strict=False)
        }
        with torch.autocast(ctx.states.device.type, enabled=False):  # forward runs without, in `recurrence`
            played = _play_scan(ctx.shards, ctx.states, held, backward=True)
            behind = {e: played[Span(e.chain, 0, e.last - e.place)].state for e in own if not e.fragment.ends}
            start_of = dict(zip(continuing, starts, strict=True))
            of_decays = [algebra.gradient(behind[e], start_of[e], decay) for e, decay in decay_of.items()]
        of_maps = (None, None, None, *of_decays, *behind.values())
        return *of_maps, *[None] * (len(ctx.needs_input_grad) - len(of_maps))


def _span(each: Own, *, backward: bool = False) -> Span:
    place = each.last - each.place if backward else each.place
    return Span(each.chain, place, place + 1)


def _play_scan(shards: Shards, states: States, held: dict[Span, Map], *, backward: bool) -> dict[Span, Map]:
    """Run this rank's program of a scan, and return all maps that the rank then holds."""
    program, held = shards.scan(backward=backward).programs[shards.topology.rank], dict(held)
    signature = states.signature("backward" if backward else "forward")

    def bundle(action: Send | Recv) -> Bundle:
        span = Span.of(action.buffer)
        if isinstance(action, Recv):
            held[span] = states.room(span)
        decay, state = held[span]
        return tuple(x.contiguous() for x in ((state,) if span.is_state else (state, decay)) if x is not None)

    with shards.exchanging(signature) as transport:
        for action in _posted(program, transport, bundle):
            assert isinstance(action, Compose)
            held[action.span] = states.algebra.composed(held[action.later], held[action.earlier])
    return held


def _posted(
    program: Program, transport: Transport, bundle: Callable[[Send | Recv], Bundle]
) -> Iterator[Action]:
    """Post the messages of a program and await them; yield its other actions when their turn comes.

    Raises:
        RuntimeError: a message failed; it names its step and ranks.
    """
    hop: list[tuple[Send | Recv, Bundle]] = []
    for action in program:
        if isinstance(action, (Send, Recv)):
            hop.append((action, bundle(action)))
        elif isinstance(action, Wait):
            try:
                for work in transport.post(action.channel, hop):
                    work.wait()
            except RuntimeError as error:
                peers = sorted({message.peer for message, _ in hop})
                raise RuntimeError(
                    f"an exchange of states or tokens: the {action.channel} messages of step {action.step} "
                    f"with ranks {peers} failed: a rank is gone or did not come in time; see for the first "
                    f"error among the other ranks ({error})"
                ) from error
            hop = []
        else:
            yield action


def _all(tensors: Bundle, _: int) -> Bundle:
    return tensors


@dataclass(frozen=True)
class RowMoves:
    """Rows of tensors that go from the shards to other tensors, and back; gradients go the other way."""

    name: str
    shards: Shards
    dim: int
    """Of rows."""
    program: Program
    """Of this rank, forth."""
    shapes: tuple[Sequence[Sequence[int]], ...]
    """Of this rank's tensors there, and of its shards."""
    share: Callable[[Bundle, int], Bundle] = _all
    """Returns what of the shards goes to a rank, and comes back from there."""
    summed: tuple[bool, ...] = (False,)
    """By tensor, whether several ranks get the same: what they send back is summed in float32, at least."""

    def carried(self, tensors: Bundle, pass_: str, back: bool) -> Bundle:
        """Return the tensors there, zero where no row goes, or `back` the sums of what comes back to shards.

        Raises:
            ValueError, RuntimeError: as `Shards.exchanging`.
        """
        dim, rank = self.dim, self.shards.topology.rank
        sent, placed = (_all, self.share) if back else (self.share, _all)
        came: list[tuple[int, range, Bundle]] = []

        def bundle(action: Send | Recv) -> Bundle:
            rows = [] if action.rows is None else list(action.rows)
            if isinstance(action, Send):
                xs = ([_part(x, dim, each) for each in rows] for x in sent(tensors, action.peer))
                return tuple(torch.cat(x, dim).contiguous() for x in xs)
            lengths = [*map(len, rows)]
            rooms = tuple(x.new_empty(resized(x, dim, sum(lengths))) for x in sent(tensors, rank))
            parts = zip(*(room.split(lengths, dim) for room in rooms), strict=True)
            came.extend((action.peer, *each) for each in zip(rows, parts, strict=True))
            return rooms

        signature = {
            "pass": f"{pass_} of {self.name}{' back' * back}",
            "shapes": ", ".join(f"{resized(x, dim, -1)} {x.dtype}" for x in tensors),
            "needs gradients": str(any(x.requires_grad for x in tensors)),
        }
        with self.shards.exchanging(signature) as transport:
            program = turned(self.program) if back else self.program
            for action in _posted(program, transport, bundle):
                assert isinstance(action, Copy)
                own = tuple(_part(x, dim, action.rows) for x in sent(tensors, rank))
                came.append((rank, action.into, own))
        outs: Bundle = ()
        for x, shape, summed in zip(tensors, self.shapes[back], self.summed, strict=True):
            outs += (x.new_zeros(shape, dtype=wide(x.dtype) if back and summed else x.dtype),)
        for peer, rows, parts in came:
            for out, each in zip(placed(outs, peer), parts, strict=True):
                _part(out, dim, rows).add_(each)
        return tuple(out.to(x.dtype) for out, x in zip(outs, tensors, strict=True))


class MovedRows(torch.autograd.Function):
    """Tensors there from those of the shards, or back."""

    @staticmethod
    def forward(ctx: Any, moves: RowMoves, back: bool, *tensors: Tensor) -> Bundle:
        ctx.moves, ctx.back = moves, back
        return moves.carried(tensors, "forward", back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.moves.carried(gradients, "backward", not ctx.back)


def halo_of(x: Tensor, dim: int, shards: Shards, reach: int) -> Tensor:
    """Return the halo of this rank: along `dim`, `reach` rows of their document before each fragment."""
    shapes = [resized(x, dim, reach * len(shards.own))], [x.shape]
    program = shards.halo(reach).programs[shards.topology.rank]
    moves = RowMoves(f"a halo of {reach} rows", shards, dim, program, shapes)
    return MovedRows.apply(moves, False, x)[0]  # type: ignore[no-any-return, no-untyped-call]


def _part(x: Tensor, dim: int, rows: range) -> Tensor:
    return x[(*[slice(None)] * (dim % x.dim()), slice(rows.start, rows.stop, rows.step))]


def resized(x: Tensor, dim: int, rows: int) -> list[int]:
    """Return the shape of a tensor with so many rows along `dim`."""
    shape = list(x.shape)
    shape[dim] = rows
    return shape

"""Runs the programs of scans and halos, with gradients: the same messages the other way round."""

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
        ctx.save_for_backward(*maps[:many], *starts)
        return (*(start.clone() for start in starts), torch.empty(0, device=states.device))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        algebra, own = ctx.states.algebra, ctx.own
        saved = ctx.saved_tensors  # once: torch's checkpoints allow no more
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
                    f"an exchange of states or halos: the {action.channel} messages of step {action.step} "
                    f"with ranks {peers} failed: a rank is gone or did not come in time; see for the first "
                    f"error among the other ranks ({error})"
                ) from error
            hop = []
        else:
            yield action


def halo_of(x: Tensor, dim: int, shards: Shards, reach: int) -> Tensor:
    """Return the halo of this rank: along `dim`, `reach` rows of their document before each fragment."""
    halo: Tensor = _Halo.apply(x, dim, shards, reach)  # type: ignore[no-untyped-call]
    return halo


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, shards: Shards, reach: int) -> Tensor:
        ctx.dim, ctx.shards, ctx.reach, ctx.shape = dim, shards, reach, x.shape
        shape = list(x.shape)
        shape[dim] = reach * len(shards.own)
        halo = x.new_zeros(shape)
        program = shards.halo(reach).programs[shards.topology.rank]
        with shards.exchanging(_signature("forward", x, dim, reach)) as transport:
            for rows, part in _moved(program, transport, x, dim):
                _part(halo, dim, rows).copy_(part)
        return halo

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        dim, shards, total = ctx.dim, ctx.shards, gradient.new_zeros(ctx.shape)
        program = turned(shards.halo(ctx.reach).programs[shards.topology.rank])
        with shards.exchanging(_signature("backward", gradient, dim, ctx.reach)) as transport:
            for rows, part in _moved(program, transport, gradient, dim):
                _part(total, dim, rows).add_(part)
        return total, None, None, None


def _moved(program: Program, transport: Transport, x: Tensor, dim: int) -> Iterator[tuple[range, Tensor]]:
    """Send rows of x as a program of a halo says; yield (rows, values) of all that came or is copied."""
    received: list[tuple[range, Tensor]] = []

    def bundle(action: Send | Recv) -> Bundle:
        rows = [] if action.rows is None else list(action.rows)
        if isinstance(action, Send):
            return (torch.cat([_part(x, dim, each) for each in rows], dim).contiguous(),)
        shape = list(x.shape)
        shape[dim] = sum(map(len, rows))
        room = x.new_empty(shape)
        received.extend(zip(rows, room.split([*map(len, rows)], dim), strict=True))
        return (room,)

    for action in _posted(program, transport, bundle):
        assert isinstance(action, Copy)
        yield action.into, _part(x, dim, action.rows)
    yield from received


def _signature(pass_: str, x: Tensor, dim: int, reach: int) -> Signature:
    others = [size for number, size in enumerate(x.shape) if number != dim % x.dim()]
    return {"pass": f"{pass_} of a halo", "reach": str(reach), "shapes": f"{others}, {x.dtype}"}


def _part(x: Tensor, dim: int, rows: range) -> Tensor:
    return x.narrow(dim, rows.start, len(rows))

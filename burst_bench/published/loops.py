"""The rings of other projects: the messages of their loops, and the bytes that they move around kernels.

Every number here was read in the source that is named next to it. No number is fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from burst_mcore.attention.schedule import actions as does
from burst_mcore.attention.schedule.actions import HOME, Channel, Compute, Kind, Link, Program, Wait

_DATA, _GRADIENT = Channel(Link.INTRA, Kind.DATA), Channel(Link.INTRA, Kind.GRADIENT)
_ROUNDED = Channel(Link.INTRA, Kind.TOTAL)
_NEXT, _NEXT_ROUNDED = Channel(Link.INTER, Kind.DATA), Channel(Link.INTER, Kind.TOTAL)


@dataclass(frozen=True)
class Passes:
    """Bytes of memory that passes around a kernel move, for each element of the result of a kernel call."""

    out: float
    """O, merged."""
    stays: float
    """A gradient, added to a sum that stays on its rank."""
    rotates: float
    """A gradient, added to a sum that rotates."""
    stand_in: float = 0.0
    """O of a rotating query: a kernel that forms D itself gets a stand-in for O."""
    keys: float = 0.0
    """K and V, in forward, copied before a call."""


OURS = Passes(out=2.5, stays=2.5, rotates=10.0, stand_in=3.3)
"""The passes of burst_mcore, which `kernel_seconds` counts."""


@dataclass(frozen=True)
class LoopPlace:
    """A place on a ring of `nodes` windows of `intra` places each."""

    position: int
    nodes: int
    intra: int

    def at(self, rounds: int, steps: int) -> int:
        """Return the place this many windows, and places of the window, ahead."""
        m, l = divmod(self.position, self.intra)  # noqa: E741
        return (m + rounds) % self.nodes * self.intra + (l + steps) % self.intra

    def exchange(self, step: int, channel: Channel, turn: int = 1) -> list[does.Action]:
        """Return one ring step of all rows: to the next place, or between windows."""
        offset = (turn, 0) if channel.link == Link.INTER else (0, turn)
        back, on = self.at(-offset[0], -offset[1]), self.at(*offset)
        return [does.Recv(step, channel, str(channel), back), does.Send(step, channel, str(channel), on)]


def together(place: LoopPlace, *, gradients: bool) -> Program:
    """Return a ring whose K, V and gradients leave together, before the kernel.

    Backward starts with the last K and V of forward, and turns the other way. So gradients are at
    home after the last kernel, and make one ring step less than there are kernel calls.
    """
    actions: list[does.Action] = []
    for step in range(place.intra):
        last, turn = step == place.intra - 1, -1 if gradients else 1
        waits = []
        if not last:
            actions += place.exchange(step, _DATA, turn)
            waits.append(Wait(step, _DATA))
        if gradients and step:
            actions += place.exchange(step, _GRADIENT, turn)
            waits.append(Wait(step, _GRADIENT))
        source = place.at(0, step + 1) if gradients else place.at(0, -step)
        actions += [Compute(step, source, HOME), *waits]
    return tuple(actions)


def windows(place: LoopPlace, *, gradients: bool, rounded: bool = False, in_line: bool = False) -> Program:
    """Return a double ring whose gradients go home within each window, and then to the next window.

    Gradients within the first window are float32, unless all are `rounded`. No compute runs while the
    last message of a window is awaited. In line, gradients leave after K and V of the next step arrive.
    """
    actions: list[does.Action] = []
    for window in range(place.nodes):
        first, onward = window * place.intra, window + 1 < place.nodes
        channel = _ROUNDED if rounded or window else _GRADIENT
        if onward:
            actions += place.exchange(first, _NEXT)
        actions += _window(place, window, channel if gradients else None, in_line)
        if gradients and place.nodes > 1:
            actions += place.exchange(first + place.intra - 1, _NEXT_ROUNDED)
        if onward:
            actions.append(Wait(first + place.intra - 1, _NEXT))
    if gradients and place.nodes > 1:
        actions.append(Wait(place.nodes * place.intra, _NEXT_ROUNDED))
    return tuple(actions)


def _window(place: LoopPlace, window: int, gradient: Channel | None, in_line: bool) -> Iterator[does.Action]:
    """Yield the steps of one window; gradient: the channel within the window, None in forward."""
    for i in range(place.intra):
        step, last = window * place.intra + i, i == place.intra - 1
        leaves = place.exchange(step, gradient) if gradient and place.intra > 1 else []
        arrives = [] if last else [Wait(step, _DATA)]
        if not last:
            yield from place.exchange(step, _DATA)
        yield Compute(step, place.at(-window, -i), HOME)
        if gradient and (i or window):
            yield Wait(step, gradient if i else _NEXT_ROUNDED)
        yield from (*arrives, *leaves) if in_line else (*leaves, *arrives)
    if gradient and place.intra > 1:
        yield Wait(window * place.intra + place.intra - 1, gradient)


follows = partial(windows, in_line=True)
"""A ring (one window): gradients are sent after each kernel, and awaited after the next kernel.

K, V and gradients use the same communicator, so they rotate one after another."""
windows_rounded = partial(windows, rounded=True)
"""All gradients have 16 bits."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The ring of a project."""

    source: str
    """Repository, commit, file and function."""
    draw: Callable[..., Program]
    """(place, whether gradients follow) -> its program."""
    float32: bool
    """Whether gradients rotate in float32 (`Kind.GRADIENT`), else in the dtype of K and V."""
    passes: Passes
    """Bytes of memory traffic around a kernel call, for an element."""
    repeats: float = 0.0
    """The same for an element of dK and dV and each query head of its group, if K and V are repeated."""


RING_FLASH = Loop(
    source="zhuzilin/ring-flash-attention@8996282: ring_flash_attn/zigzag_ring_flash_attn.py, "
    "zigzag_ring_flash_attn_backward; utils.py, update_out_and_lse. The same in "
    "feifeibear/long-context-attention@b93c30e: yunchang/ring",
    draw=follows, float32=True, passes=Passes(out=10.0, stays=10.0, rotates=10.0),
)  # fmt: skip
"""One kernel reads a result (2 bytes), and merges or adds it to a float32 sum (4 read, 4 written)."""

INTERNEVO = Loop(
    source="InternLM/InternEvo@23c67ed: internlm/model/ops/ring_flash_attn/"
    "zigzag_ring_flash_attn_with_sliding_window.py, zigzag_double_ring_flash_attn_backward",
    draw=windows, float32=True, passes=RING_FLASH.passes,
)  # fmt: skip
"""Sums are float32 in the first window, and 16 bits from one window to the next."""

TRANSFORMER_ENGINE = Loop(
    source="NVIDIA/TransformerEngine@d0067d0: transformer_engine/pytorch/attention/dot_product_attention/"
    "context_parallel.py, AttnFuncWithCPAndKVP2P, flash_attn_fwd_out_correction",
    draw=together, float32=False, passes=Passes(out=6.0, stays=6.0, rotates=10.0),
)  # fmt: skip
"""All sums have 16 bits (2 read twice, 2 written); dK and dV are joined first (2 read, 2 written)."""
_MAGI = "SandAI-org/MagiAttention@2c64135: exps/dist_attn/baselines/"
_HOPPER = Passes(out=6.0 + 1 + 4 + 6, stays=6.0 + 3 + 12 + 6, rotates=10.0 + 1 + 4 + 6, keys=1.0 + 4)
"""As in TransformerEngine. Also, halves of operands are copied out (4 for half of the rows in half of the
steps: 1 for each operand). FlashAttention 3 gets operands that were gathered by row (2 read, 2 written), and
its results are scattered into zeros (4 written, 2 read)."""
_BLACKWELL = Passes(out=6.0 + 1, stays=6.0 + 3, rotates=10.0 + 1 + 4, keys=1.0)
"""As on Hopper, but cuDNN takes operands as they are. Backward repeats K and V for each query head."""
MAGI_RING = {
    9: Loop(
        source=_MAGI + "ring_attn.py, FA3RingAttnFunc; utils_cp.py, _fa3_varlen_forward",
        draw=together, float32=False, passes=_HOPPER,
    ),
    10: Loop(
        source=_MAGI + "ring_attn.py, TERingAttnFunc",
        draw=together, float32=False, passes=_BLACKWELL, repeats=4.0,
    ),
}  # fmt: skip
"""The ring in MagiAttention's benchmark, by major compute capability."""
MAGI_DOUBLE_RING = {
    9: replace(MAGI_RING[9], source=_MAGI + "loongtrain.py, FA3DoubleRingAttnFunc", draw=windows_rounded),
    10: replace(MAGI_RING[10], source=_MAGI + "loongtrain.py, TEDoubleRingAttnFunc", draw=windows_rounded),
}
"""LoongTrain's double ring in the same benchmark."""
MAGI_ULYSSES = {
    9: Loop(
        source=_MAGI + "ulysess.py, FA3UlysessAttnFunc",
        draw=follows, float32=False,
        passes=Passes(out=10.0, stays=18.0, rotates=10.0, keys=4.0),
    )
}  # fmt: skip
"""Ulysses in the same benchmark, on Hopper: operands gathered and results scattered around a kernel call."""
DEEPSPEED = Loop(
    source="deepspeedai/DeepSpeed: deepspeed/sequence/layer.py, DistributedAttention",
    draw=follows, float32=False, passes=Passes(out=0.0, stays=0.0, rotates=0.0),
)  # fmt: skip
"""One kernel call between exchanges of heads."""


@dataclass(frozen=True, kw_only=True)
class Gather:
    """Attention of a project after a gather of K and V, a call for each half of its queries."""

    source: str
    passes: Passes
    """Bytes of memory for an element of Q and O."""
    forward: float
    """Bytes of memory for an element of all ranks' K and V."""
    backward: float
    read: float = 0.0
    """The same in both passes for the elements that each call reads."""
    read_backward: float = 0.0
    repeats: float = 0.0
    """The same in backward for each query head of a group, if K and V are repeated."""


TE_GATHER = Gather(
    source=TRANSFORMER_ENGINE.source.split(",")[0] + ", AttnFuncWithCPAndKVAllGather",
    passes=Passes(out=4.0, stays=4.0, rotates=0.0), forward=4.0, backward=4.0 + 12 + 4,
)  # fmt: skip
"""K and V are put in order (2 read, 2 written), gradients of both calls added (6 each), put in order."""
MAGI_GATHER = {
    9: Gather(
        source=_MAGI + "ring_attn.py, FA3RingAGAttnFunc",
        passes=Passes(out=4.0 + 4 + 6 + 4, stays=8.0 + 12 + 6 + 4, rotates=0.0),
        forward=4.0, backward=4.0 + 2 + 2 * 2 + 12 + 4, read=4.0, read_backward=4.0,
    ),
    10: Gather(
        source=_MAGI + "ring_attn.py, TERingAGAttnFunc",
        passes=Passes(out=4.0 + 4, stays=8.0 + 4, rotates=0.0),
        forward=4.0, backward=4.0 + 2 + 12 + 4 + 6, repeats=2.0 + 4,
    ),
}  # fmt: skip
"""As in TransformerEngine. Also, halves are copied out, and results into their half (4 each). On Hopper
operands are gathered by row (4) and results scattered (2 read, 2 written) into zeros (2). Sums start at zero
(2). On Blackwell, in backward, K and V are repeated once, and their gradients summed by both calls."""

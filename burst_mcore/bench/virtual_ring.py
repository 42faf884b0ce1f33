"""One rank's share of a ring on one GPU: bundles arrive by asynchronous copies instead of from neighbours.

What is real: the rank's program, its kernels, merging, accumulation, streams and waits, and copies of the
bytes that a network would bring, from memory of the device, or from pinned host memory over PCIe as a
stand-in for a network card. What is not: the values that arrive, and anybody at the other end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from burst_mcore.attention.actions import Channel, Recv, Send
from burst_mcore.attention.arguments import Shape
from burst_mcore.attention.elementwise import row_delta
from burst_mcore.attention.kernels.kernel import Problem, RowGradients, Scores
from burst_mcore.attention.kernels.table import choose
from burst_mcore.attention.passes import Attended, Call, Keys, Queries, backward, forward
from burst_mcore.attention.plan import plan
from burst_mcore.attention.ring import Bundle
from burst_mcore.attention.rows import take
from burst_mcore.attention.schedule import Route
from burst_mcore.layout import Layout
from burst_mcore.mask import Mask

FROM = ("device", "host", "nowhere")
"""Where bundles come from; "nowhere": buffers are left as they are, for a ring without communication."""


class Copies:
    """A transport whose messages are copies on a stream of their own. On the CPU they are done at once."""

    def __init__(self, source: str, device: torch.device, poison: bool = False) -> None:
        if source not in FROM:
            raise ValueError(f"bundles come from one of {', '.join(FROM)}, not {source!r}")
        self._source, self._cuda, self._poison = source, device.type == "cuda", poison
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._kept: dict[tuple[object, ...], Tensor] = {}
        self.bytes = 0
        """That came."""

    def connect(self, name: str) -> None:
        """Nobody is there."""

    def post(self, channel: Channel, messages: Sequence[tuple[Send | Recv, Bundle]]) -> Sequence[_Copied]:
        """Copy what is to be received; what is sent goes nowhere."""
        came = [x for action, bundle in messages if isinstance(action, Recv) for x in bundle]
        self.bytes += sum(x.nbytes for x in came)
        if self._poison:  # who reads before the copy is waited for reads NaN
            for x in came:
                x.fill_(torch.nan)
        if self._stream is None:
            for index, x in enumerate(came):
                x.copy_(self._values(x, index))
            return [_Copied(None)]
        if self._source != "nowhere":
            self._stream.wait_stream(torch.cuda.current_stream())  # who read these buffers before is done
            with torch.cuda.stream(self._stream):
                for index, x in enumerate(came):
                    x.copy_(self._values(x, index), non_blocking=True)
                    x.record_stream(self._stream)
        return [_Copied(self._stream.record_event())]

    def _values(self, x: Tensor, index: int) -> Tensor:
        """What arrives: random numbers, made once for each shape and place in a bundle."""
        key = x.shape, x.dtype, index
        if key not in self._kept:
            values = torch.randn(x.shape, device=x.device).to(x.dtype)
            host = self._source == "host" and self._cuda
            self._kept[key] = values.cpu().pin_memory() if host else values
        return self._kept[key]


@dataclass(frozen=True)
class _Copied:
    event: torch.cuda.Event | None

    def wait(self) -> None:
        """Hold back the current stream, not the host."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class VirtualRank:
    """A rank in the middle of a ring of `size`, with `shape.tokens` tokens of its own."""

    def __init__(
        self,
        shape: Shape,
        size: int,
        *,
        mask: Mask,
        source: str,
        kernel: str = "auto",
        direction: str = "query",
        layout: str = "zigzag",
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cuda",
        poison: bool = False,
    ) -> None:
        self.shape, self.device = shape, torch.device(device)
        problem = Problem(device, dtype, shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim)
        n = shape.tokens * size
        self.transport = Copies(source, self.device, poison)
        self.call = Call(
            rank=size // 2,
            route=Route(nodes=1, intra=size),
            plan=plan(Layout.of(layout), mask, n, size),
            scores=Scores(shape.head_dim**-0.5),
            problem=problem,
            kernel=choose(kernel, problem),
            direction=direction,
            grad_dtype=torch.float32,
            transport=self.transport,
            kv_heads=shape.kv_heads,
        )

        def draw(heads: int, dim: int) -> Tensor:
            return torch.randn(shape.batch, shape.tokens, heads, dim, device=self.device).to(dtype)

        self.q, self.k = draw(shape.heads, shape.head_dim), draw(shape.kv_heads, shape.head_dim)
        self.v, self.dout = draw(shape.kv_heads, shape.value_dim), draw(shape.heads, shape.value_dim)

    def forward(self) -> Attended:
        """This rank's forward."""
        return forward(self.call, self.q, self.k, self.v)

    def backward(self, done: Attended) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's backward, with D."""
        delta = row_delta(self.dout, done.out)
        queries = Queries(done.q, self.dout, delta, done.ring_lse)
        return backward(self.call, queries, Keys(done.k, done.v), done.out)

    @property
    def pairs(self) -> int:
        """Query-key pairs of the forward."""
        here, size = self.call.position, self.call.route.positions
        return sum(tile.pairs for source in range(size) for tile in self.call.tiles(here, source))

    def bare_forward(self) -> None:
        """The kernel alone on the tiles of the forward."""
        for at in range(self.call.route.positions):
            for tile in self.call.tiles(self.call.position, at):
                rows = take(self.q, tile.q), take(self.k, tile.k), take(self.v, tile.k)
                self.call.kernel.forward(*rows, tile.seen, self.call.scores)

    def bare_backward(self, done: Attended) -> None:
        """The kernel alone on the tiles of the backward; out stands for itself."""
        here, travels = self.call.position, self.call.direction == "query"
        delta = row_delta(self.dout, done.out)
        for at in range(self.call.route.positions):
            for tile in self.call.tiles(*((at, here) if travels else (here, at))):
                x = RowGradients(
                    take(self.dout, tile.q),
                    take(self.q, tile.q),
                    take(self.k, tile.k),
                    take(self.v, tile.k),
                    take(done.out, tile.q),
                    take(done.ring_lse, tile.q),
                    take(delta, tile.q),
                )
                self.call.kernel.backward(x, tile.seen, self.call.scores)

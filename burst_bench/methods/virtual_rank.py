"""One rank's share of a ring on one GPU: blocks arrive by asynchronous copies instead of from neighbours.

Real are the rank's program, its kernels, merging, accumulation, streams and waits, and copies from device
memory of as many bytes as a network would bring. Not real are the received values and the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from burst_bench.methods.kernels import Tiles
from burst_mcore import Layout, Mask
from burst_mcore.attention.backward import backward
from burst_mcore.attention.call import Attended, Call, Keys, Queries
from burst_mcore.attention.forward import Inputs, forward
from burst_mcore.attention.geometry.pattern import Pattern
from burst_mcore.attention.geometry.plan import plan_of
from burst_mcore.attention.geometry.shard import Placement, Shard
from burst_mcore.attention.geometry.tiles import Tile, launches_of
from burst_mcore.attention.kernels.kernel import BackwardInputs, Kernel, Scores
from burst_mcore.attention.kernels.table import choose
from burst_mcore.attention.numerics.latent import Expansion, LatentBlocks
from burst_mcore.attention.numerics.rowwise import row_delta
from burst_mcore.attention.resolve import problem_of
from burst_mcore.attention.runtime.executor import Buffer
from burst_mcore.attention.schedule.actions import Channel, Pass, Recv, Send
from burst_mcore.attention.schedule.route import Route
from burst_mcore.dtypes import wide


class Copies:
    """A transport whose messages are copies on a separate stream. On the CPU they are done at once.

    writes: whether a message writes its buffer, which else keeps what the memory had.
    """

    def __init__(self, device: torch.device, *, writes: bool = True) -> None:
        self._writes = writes
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._values: dict[tuple[object, ...], Tensor] = {}
        """Received values by shape, dtype and place in a block: random numbers."""
        self.abandoned: list[object] = []
        self.bytes = 0
        """Bytes that were received, or would have been received again."""

    def post(
        self, channel: Channel, messages: Sequence[tuple[Send | Recv, Buffer]]
    ) -> Sequence[torch.cuda.Event]:
        """Copy the messages to receive; sends are dropped. The current stream waits for the event."""
        buffers = [x for action, block in messages if isinstance(action, Recv) for x in block]
        self.bytes += sum(x.nbytes for x in buffers)
        targets = [(x, (x.shape, x.dtype, index)) for index, x in enumerate(buffers) if self._writes]
        for x, key in targets:
            if key not in self._values:
                self._values[key] = torch.randn(x.shape, device=x.device).to(x.dtype)
        if self._stream is not None and targets:
            self._stream.wait_stream(torch.cuda.current_stream())  # earlier readers of these have ended
        with torch.cuda.stream(self._stream):  # which is none on the CPU
            for x, key in targets:
                x.copy_(self._values[key], non_blocking=True)
                if self._stream is not None:
                    x.record_stream(self._stream)
        return [] if self._stream is None else [self._stream.record_event()]


def idle(kernel: Kernel) -> Kernel:
    """Return a kernel with the interface of `kernel` that computes nothing: its results exist before.

    Each tile has its random results, made at its first call; the caller may write them, as a
    kernel's, and gets them again as it left them. It never merges or adds in place, whatever `kernel` does:
    the work around it is that around a stock kernel.
    """
    outs: dict[Pattern, tuple[Tensor, Tensor]] = {}
    gradients: dict[Pattern, tuple[Tensor, Tensor, Tensor]] = {}

    def random_like(x: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape or x.shape, device=x.device).to(dtype or x.dtype)

    def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, scores: Scores) -> tuple[Tensor, Tensor]:
        if pattern not in outs:
            batch, rows, heads, _ = q.shape
            lse = random_like(q, batch, heads, rows, dtype=wide(q.dtype))
            outs[pattern] = random_like(q, batch, rows, heads, v.shape[-1]), lse
        return outs[pattern]

    def backward(inputs: BackwardInputs, pattern: Pattern, scores: Scores) -> tuple[Tensor, Tensor, Tensor]:
        if pattern not in gradients:
            gradients[pattern] = random_like(inputs.q), random_like(inputs.k), random_like(inputs.v)
        return gradients[pattern]

    return replace(kernel, forward=forward, backward=backward, in_place=None)


class VirtualRank:
    """A rank in the middle of a ring of `size`, with `shape.tokens` local tokens.

    With `works=False` its kernel is `idle` and its messages write nothing: its passes take the time of the
    work around kernels. If the latent rotates, `k` and `v` are it and its rope key.
    """

    def __init__(
        self,
        shape: Shard,
        size: int,
        *,
        mask: Mask,
        kernel: str = "auto",
        works: bool = True,
        direction: Pass = Pass.QUERY,
        device: str = "cuda",
    ) -> None:
        self.shape, self.device = shape, torch.device(device)
        n, packed = shape.tokens * size, mask.document_ends is not None
        problem = problem_of(shape, device=device, launches=launches_of(mask, n), documents=packed)
        self.transport = Copies(self.device, writes=works)
        working = choose(kernel, problem)
        self.call = Call(
            rank=size // 2, route=Route(nodes=1, intra=size),
            plan=plan_of(Layout("zigzag"), mask, n, Placement(size)), scores=Scores(shape.head_dim**-0.5),
            problem=problem, kernel=working if works else idle(working), direction=Pass(direction),
            grad_dtype=shape.grad_dtype, kv_heads=shape.carried[0], latent_rotates=shape.latent_rotates,
        )  # fmt: skip

        def draw(heads: int, dim: int) -> Tensor:
            return torch.randn(shape.batch, shape.tokens, heads, dim, device=self.device).to(shape.dtype)

        self.q, self.dout = draw(shape.heads, shape.head_dim), draw(shape.heads, shape.value_dim)
        self.up: Tensor | None = None
        if shape.latent is None:
            self.k, self.v = draw(shape.kv_heads, shape.head_dim), draw(shape.kv_heads, shape.value_dim)
        else:
            (width, rope), columns = shape.latent, shape.head_dim - shape.latent[1] + shape.value_dim
            self.k, self.v = draw(1, width), draw(1, rope)
            up = torch.randn(shape.heads, width, columns, device=self.device) / width**0.5
            self.up = up.to(shape.dtype)
        expansion = self.expansion
        self.keys = Keys(*(expansion.expand(self.k, self.v) if expansion else (self.k, self.v)))
        """K and V of all heads, only for the kernel."""

    @property
    def expansion(self) -> Expansion | None:
        """The weights of the latent's expansion, for one pass."""
        if self.up is None:
            return None
        return Expansion(self.up, range(self.shape.heads), self.shape.value_dim)

    def forward(self) -> Attended:
        return forward(self.call, self.transport, Inputs(self.q, self.on_ring(self.k, self.v)))

    def on_ring(self, k: Tensor, v: Tensor) -> Keys:
        """Return the key side of a pass: K and V, or the latent and the rope key."""
        expansion = self.expansion
        return Keys(k, v) if expansion is None else Keys(k, v, partial(LatentBlocks, expansion))

    def queries(self, result: Attended) -> Queries:
        """Return the query side of its backward, with D computed."""
        return Queries(result.q, self.dout, row_delta(self.dout, result.out), result.ring_lse)

    def backward(self, result: Attended) -> tuple[Tensor, Tensor, Tensor]:
        """Run this rank's backward, D included."""
        keys = self.on_ring(result.k, result.v)
        return backward(self.call, self.transport, self.queries(result), keys, result.out)

    def tiles(self, pass_: Pass) -> list[Tile]:
        return [tile for tiles in self.call.tiles_of_pass(pass_) for tile in tiles]

    @property
    def pairs(self) -> int:
        return sum(tile.pattern.pairs for tile in self.tiles(Pass.FORWARD))

    def bare(self, pass_: Pass) -> Tiles:
        """Return the kernel's calls alone for the tiles of a pass, with this rank's tensors as stand-ins."""
        return Tiles(self.call.kernel, self.tiles(pass_), (self.q, *self.keys.tensors, self.dout))

"""Recording and replay: the results that attention saves in a checkpointed forward for its recomputation.

A checkpointed layer executes twice. Its forward drops its results, and its recomputation, in the middle of
backward, computes them again. `burst_mcore.checkpointing` registers both executions on their thread
(`entered`), where attention calls find them.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from burst_mcore.attention.call import Attended, Call
from burst_mcore.attention.forward import Inputs, forward
from burst_mcore.attention.geometry.cuts import cut_for
from burst_mcore.attention.geometry.rows import Rows, count, gather, scatter_views
from burst_mcore.attention.request import Request
from burst_mcore.attention.runtime.executor import Transport
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.wrap import while_set


class RecomputeError(RuntimeError):
    """The error of a recomputation that does not repeat its forward, so that gradients would be wrong."""


class CallId(NamedTuple):
    """The identity of a call, which a call and its recomputation share."""

    request: Request
    layer: str | None
    """The name of the layer, if known: see `of_layer`."""
    topology: Topology

    def __str__(self) -> str:
        owner = "" if self.layer is None else f" of {self.layer}"
        shard = self.request.shard
        shapes = f"{list(shard.q_shape)} {shard.dtype}, value_dim {shard.value_dim}"
        return f"a call{owner} with q {shapes}, {self.request.mask}"

    def unlike(self, other: CallId) -> str:
        """Return the properties that differ, with the value of this call first."""
        facts, others = self._properties, other._properties
        return "; ".join(f"{x} {facts[x]}, not {others[x]}" for x in facts if facts[x] != others[x])

    @property
    def _properties(self) -> dict[str, object]:
        shard, ring = self.request.shard, self.topology.communicators
        return {**self.request.signature, "tokens": shard.tokens, "layer": self.layer, "ring": ring}

    @property
    def bytes(self) -> int:
        """Bytes of the results on this rank: O, and LSE in at least float32."""
        return self.request.shard.result_bytes


@dataclass
class SavedSuffix:
    """The results of a call for a suffix of the sequence, saved in forward."""

    cut: int
    """The first global position of the suffix."""
    tensors: list[Tensor]
    """Of this rank's rows in the suffix: out [B, rows, H, D], lse [B, H, rows]. Under head x ring lse is of
    the pooled rows and own heads; with `Call.lse_at_home`, lse [B, H, rows] of its own rows follows.
    Empty if nothing is saved."""
    copied: bool
    """Whether the tensors are copies; else they are the results, shared with the caller."""


@dataclass(frozen=True)
class Recompute:
    """The part of a call's results that a checkpoint keeps, or kept in the forward of a recomputation."""

    keep: float = 0.0
    """The share of the sequence with saved results: see `cut_for`."""
    at_most: bool = False
    """Whether `keep` is an upper limit; the minimum over the ranks counts."""
    suffix: SavedSuffix | None = None
    """In a recomputation, the results that the forward saved."""

    @cached_property
    def signature(self) -> dict[str, str]:
        """The properties that the ranks must have in common."""
        cut = self.suffix.cut if self.suffix is not None and self.suffix.tensors else None
        return {
            "keeps": "what fits" if self.at_most else repr(self.keep),
            "recomputes": "all" if cut is None else f"before {cut}",
        }


NOTHING_KEPT = Recompute()
"""The value for calls outside of checkpointed functions."""


class SavedCalls(Protocol):
    """The forward of one call of a checkpointed function, or its recomputation."""

    keeps: bool
    """Whether results may be kept; else calls are only compared."""

    def share(self, call_id: CallId) -> tuple[float, bool]:
        """Return the share of the sequence to save of this call, and whether it is an upper limit."""

    def record(self, call_id: CallId, suffix: SavedSuffix) -> None:
        """Save the suffix results of a call."""

    def replay(self, call_id: CallId) -> SavedSuffix | None:
        """Return the suffix results that the forward saved of this call; None from the second time on.

        Raises:
            RecomputeError: the forward did not make this call.
        """


class _Entered(threading.local):
    """The checkpointed forwards and recomputations of a thread, outermost first."""

    recordings: tuple[SavedCalls, ...] = ()
    replays: tuple[SavedCalls, ...] = ()
    layer: str | None = None
    """The name of the layer, if known."""
    in_checkpoint: bool = False
    """Whether the thread is in a forward that may keep results, or in its recomputation."""


entered = _Entered()


def keeps_results() -> bool:
    """Return whether a checkpoint of this thread may save results of calls, or has saved some."""
    return any(scope.keeps for scope in (*entered.recordings, *entered.replays))


def compare(call_id: CallId) -> None:
    """Compare a call without saved results to that of the forward; errors as `recompute_of`."""
    for replay in entered.replays:
        replay.replay(call_id)
    for recording in entered.recordings:
        recording.record(call_id, SavedSuffix(0, [], copied=True))


def recompute_of(call_id: CallId) -> Recompute:
    """Return the part of a call's results that this thread's checkpoints save, or saved in its forward.

    Raises:
        RecomputeError: this is a recomputation, and the forward did not make this call.
    """
    suffixes = [replay.replay(call_id) for replay in entered.replays]
    suffix = next((suffix for suffix in suffixes if suffix is not None), None)
    if suffix is not None:
        return Recompute(suffix=suffix)
    keep, at_most = max([(0.0, False), *(recording.share(call_id) for recording in entered.recordings)])
    return Recompute(keep, at_most)


def of_layer(name: str) -> AbstractContextManager[None]:
    """Set the layer of calls on this thread: part of their `CallId`, and named in errors."""
    return while_set(entered, layer=name)


def forward_of_prefix(
    call: Call, transport: Transport, inputs: Inputs, saved: SavedSuffix, tokens: int
) -> Attended:
    """Run `forward` for the prefix of queries before a saved suffix, and insert the saved results.

    Under head x ring all rows of q, k and v still go through the head groups: the backward needs them.

    tokens: the tokens of this rank; the rest of its rows is padding.

    Raises:
        ValueError: the saved shapes do not fit the cut.
    """
    cut = saved.cut
    rows = _own_suffix(call, cut, tokens)
    ring_rows = _suffix_on_ring(call, cut, rows)
    out, lse, *home = saved.tensors
    max_logit = home.pop().clone() if call.scores.max_logit else None
    if (out.shape[1], lse.shape[2]) != (count(rows), count(ring_rows)):
        raise ValueError(
            f"out and lse of {count(rows)} and {count(ring_rows)} rows are after the cut at {cut} of "
            f"{call.plan.n}, but the saved suffix has {out.shape[1]} and {lse.shape[2]}"
        )
    if cut == 0 and call.route.heads == 1:
        lse = lse.clone()
        keys = inputs.keys
        return Attended(out.clone(), lse, inputs.q, keys.k, keys.v, lse, max_logit)
    attended = forward(call.variant(cut, lambda: {"plan": call.plan.prefix(cut)}), transport, inputs)
    _fill(attended.out, rows, out)
    _fill(attended.ring_lse, ring_rows, lse)
    for values in home:
        assert attended.lse is not None
        _fill(attended.lse, rows, values)
    return attended._replace(max_logit=max_logit)


def save(request: Request, call: Call, recompute: Recompute, attended: Attended, tokens: int) -> SavedSuffix:
    """Return copies of the results of a suffix, about the share `Recompute.keep` of the sequence.

    These are out and lse on the ring of this rank's rows. Then follow lse at home (`Call.lse_at_home`, under
    head x ring), and the max logits of all rows, if requested.
    """
    layout, mask, size = request.layout, request.mask, request.ranks.size
    cut = cut_for(recompute.keep, layout, mask, call.plan.n, size, at_most=recompute.at_most).position
    rows = _own_suffix(call, cut, tokens)
    suffix = [gather(attended.out, rows), gather(attended.ring_lse, _suffix_on_ring(call, cut, rows))]
    if call.route.heads > 1 and attended.lse is not None:
        suffix.append(gather(attended.lse, rows))
    if attended.max_logit is not None:
        suffix.append(attended.max_logit)
    copies = [x.clone(memory_format=torch.contiguous_format) for x in suffix]
    return SavedSuffix(cut, copies, copied=True)


def _own_suffix(call: Call, cut: int, tokens: int) -> Rows:
    runs = call.plan.runs(call.ring_rank, call.member)
    prefix = sum(len(range(run.start, min(run.stop, cut), run.step)) for run in runs)
    return (range(min(tokens, prefix), tokens),)


def _suffix_on_ring(call: Call, cut: int, local_rows: Rows) -> Rows:
    """Return the suffix rows on the ring, padding included: of this rank, or of its head group."""
    rows = call.plan.rows_from(call.ring_rank, cut) if call.route.heads > 1 else local_rows
    return rows or (range(0),)


def _fill(x: Tensor, rows: Rows, values: Tensor) -> None:
    for destination, share in scatter_views(x, rows, values):
        destination.copy_(share)

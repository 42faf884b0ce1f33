"""Bytes of memory that a ring moves around its kernels: merges, sums, casts, D and the stand-in for O."""

from dataclasses import replace

import pytest
import torch
from torch.utils import deterministic
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from burst_bench.methods import virtual_rank
from burst_bench.methods.virtual_rank import VirtualRank
from burst_mcore import Mask
from burst_mcore.attention import backward as backward_module
from burst_mcore.attention.geometry.shard import Shard
from burst_mcore.attention.kernels import kernel as kernel_module
from burst_mcore.attention.numerics import merge

VIEWS = {"aten.slice", "aten.transpose", "aten.view", "aten.unsqueeze", "aten.alias", "aten.detach"}
MAKES = {"aten.empty", "aten.empty_like", "aten.new_empty", "aten.new_empty_strided", "aten.empty_strided"}


class Moved(TorchDispatchMode):
    """Bytes that operators read and write, each tensor once; a pass of ours counts as one operator."""

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def count(self, name, tensors):
        self.bytes[name] = self.bytes.get(name, 0) + sum(x.nbytes for x in tensors)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        name = str(func.overloadpacket)
        if name in MAKES | VIEWS:
            return result
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        wrote = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        only_written = read[:1] if name in ("aten.copy_", "aten.fill_", "aten.zero_") else []
        if name.endswith("_") and not only_written:
            wrote += read[:1]  # it is read, and written
        self.count(name, [x for x in read if not any(x is y for y in only_written)])
        self.count(name, [x for x in wrote if not any(x is y for y in read)] + only_written)
        return result


def _as_one(moved, monkeypatch, owner, name, tensors_of):
    """Count a pass as one operator, that reads and writes `tensors_of(args, result)` once."""
    run = getattr(owner, name)

    def counted(*args):
        with torch.utils._python_dispatch._disable_current_modes():
            result = run(*args)
        moved.count(name, tensors_of(args, result))
        return result

    monkeypatch.setattr(owner, name, staticmethod(counted) if isinstance(owner, type) else counted)


def _outputs_and_parts(args, result):
    parts, *outputs = args
    if len(parts) == 1 and tree_leaves(parts)[0] is outputs[0]:
        return []
    return [*tree_leaves(parts), *outputs]


@pytest.fixture
def moved(monkeypatch):
    monkeypatch.setattr(deterministic, "fill_uninitialized_memory", False)  # filling with NaN is no pass
    moved = Moved()
    _as_one(moved, monkeypatch, merge.OnlineSoftmax, "_combine", _outputs_and_parts)
    _as_one(moved, monkeypatch, merge, "add_up", _outputs_and_parts)
    post = virtual_rank.Copies.post

    def arrive(*args):  # what a network writes is no pass either
        with torch.utils._python_dispatch._disable_current_modes():
            return post(*args)

    monkeypatch.setattr(virtual_rank.Copies, "post", arrive)
    of_backward = [(module, "output_stand_in") for module in (backward_module, kernel_module)]
    for module, name in (*of_backward, (virtual_rank, "row_delta")):
        _as_one(moved, monkeypatch, module, name, lambda args, result: [*args[:2], result])
    return moved


def _passes(moved, direction="query", kv_heads=4, takes_delta=False):
    """Bytes per element of q that a forward and a backward move around their kernels."""
    shape = {"batch": 1, "tokens": 64, "heads": 4, "kv_heads": kv_heads, "head_dim": 128, "value_dim": 128}
    shard = Shard(**shape, dtype=torch.bfloat16)
    mask, found = Mask.causal(), []
    rank = VirtualRank(shard, 8, mask=mask, direction=direction, device="cpu", works=False)
    rank.call = replace(rank.call, kernel=replace(rank.call.kernel, takes_delta=takes_delta))
    for _ in range(2):  # at first results of the kernel, and what arrives, are drawn
        found = []
        done = rank.forward()
        for run in (rank.forward, lambda done=done: rank.backward(done)):
            moved.bytes.clear()
            with moved:
                run()
            found.append({name: size / rank.q.numel() for name, size in moved.bytes.items()})
    return found


@pytest.mark.parametrize(
    ("direction", "kv_heads", "takes_delta", "backward"),
    [("query", 4, True, 86.1), ("query", 4, False, 106.2), ("kv", 4, False, 123.1), ("kv", 1, False, 45.1)],
)
def test_bytes_around_kernels(moved, direction, kv_heads, takes_delta, backward):
    """A zigzag ring of 8 in bfloat16, seen from a rank in its middle; before parts waited: 67 and 233."""
    in_forward, in_backward = _passes(moved, direction, kv_heads, takes_delta)
    assert set(in_forward) <= {"_combine", "aten.promote_types"}, "passes of their own beside merging"
    assert 13 < sum(in_forward.values()) <= 15.5  # 6.5 parts of 2 bytes a row, and the result
    assert backward - 0.1 < sum(in_backward.values()) <= backward <= (110 if direction == "query" else 130)
    assert ("output_stand_in" in in_backward) == (direction == "query" and not takes_delta)

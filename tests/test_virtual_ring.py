"""The virtual ring runs a real rank's program; here on the CPU, where its copies are done at once."""

import pytest
import torch

from burst_mcore import Mask
from burst_mcore.attention.actions import Recv
from burst_mcore.attention.arguments import Shape
from burst_mcore.attention.schedule import program
from burst_mcore.bench.virtual_ring import VirtualRank


@pytest.mark.parametrize("direction", ["query", "kv"])
@pytest.mark.parametrize("size", [1, 4])
def test_it_receives_what_its_program_says(size, direction):
    shape = Shape(1, 32, 4, 2, 16, 16)
    rank = VirtualRank(
        shape,
        size,
        mask=Mask.causal(),
        source="device",
        direction=direction,
        dtype=torch.float32,
        device="cpu",
    )
    assert rank.pairs == (32 * size) * (32 * size + 1) // 2 // size  # zigzag is even to the last pair
    done = rank.forward()
    per_row = 2 * 2 * 16 * 4  # K and V
    steps = program(rank.call.rank, rank.call.route, "forward", rank.call.plan)
    rows = sum(32 if a.rows is None else sum(map(len, a.rows)) for a in steps if isinstance(a, Recv))
    assert rank.transport.bytes == rows * per_row
    gradients = rank.backward(done)
    assert [x.shape for x in gradients] == [rank.q.shape, rank.k.shape, rank.v.shape]
    assert all(x.isfinite().all() for x in gradients)
    rank.bare_forward()
    rank.bare_backward(done)


def test_an_unknown_source_is_refused():
    with pytest.raises(ValueError, match="device, host, nowhere, not 'moon'"):
        VirtualRank(
            Shape(1, 8, 1, 1, 8, 8), 2, mask=Mask.full(), source="moon", dtype=torch.float32, device="cpu"
        )

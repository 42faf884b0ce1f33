import pytest
import torch

from burst_mcore.attention.runtime import buffers
from burst_mcore.attention.runtime.buffers import Lease

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_pool(monkeypatch):
    monkeypatch.setattr(buffers, "_POOL", buffers._Pool())


def test_a_buffer_is_used_again_and_comes_poisoned():
    with Lease() as lease:
        first = lease.empty((2, 3), torch.float32, CPU)
        first.zero_()
    with Lease() as lease:
        second = lease.empty((2, 3), torch.float32, CPU)
        assert second is first
        assert second.isnan().all()
        assert lease.empty((2, 3), torch.float32, CPU) is not first
        assert lease.empty((2, 3), torch.bfloat16, CPU) is not first


def test_two_passes_never_share_a_buffer():
    with Lease() as earlier:
        earlier.empty((4,), torch.float32, CPU)
    with Lease() as one, Lease() as two:
        assert one.empty((4,), torch.float32, CPU) is not two.empty((4,), torch.float32, CPU)


def test_what_is_kept_or_was_held_at_an_error_is_not_used_again():
    with Lease() as lease:
        kept = lease.keep(lease.empty((4,), torch.float32, CPU))
    with Lease() as lease:
        assert lease.empty((4,), torch.float32, CPU) is not kept
    with pytest.raises(RuntimeError, match="step"), Lease() as lease:
        lost = lease.empty((4,), torch.float32, CPU)
        raise RuntimeError("step")
    with Lease() as lease:
        assert lease.empty((4,), torch.float32, CPU) is not lost


def test_buffers_of_inference_mode_stay_there():
    with torch.inference_mode(), Lease() as lease:
        lease.empty((4,), torch.float32, CPU)
    with Lease() as lease:
        assert not lease.empty((4,), torch.float32, CPU).is_inference()


def test_the_pool_forgets_shapes_that_are_not_used():
    for size in range(1, 3 * buffers.SHAPES):
        with Lease() as lease:
            lease.empty((size,), torch.float32, CPU)
    assert len(buffers._POOL._free) == buffers.SHAPES

import threading

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
    with Lease() as one, Lease() as two:
        assert one.empty((4,), torch.float32, CPU) is not two.empty((4,), torch.float32, CPU)


def test_what_is_kept_or_was_held_at_an_error_is_not_used_again():
    with Lease() as lease:
        kept = lease.keep(lease.empty((4,), torch.float32, CPU))
    with pytest.raises(RuntimeError, match="hop"), Lease() as lease:
        lost = lease.empty((4,), torch.float32, CPU)
        raise RuntimeError("hop")
    with Lease() as lease:
        assert all(lease.empty((4,), torch.float32, CPU) is not x for x in (kept, lost))


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


def test_threads_share_the_pool():
    seen = []

    def use():
        for _ in range(200):
            with Lease() as lease:
                x = lease.empty((8,), torch.float32, CPU)
                x.fill_(threading.get_ident() % 1000)
                seen.append((x == x[0]).all().item())

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(seen) and len(seen) == 800

import pytest

from burst_mcore.attention.cost import Shard, backward_bytes, cheaper_backward, forward_bytes


def _shard(heads, kv_heads, *, tokens=64, head_dim=128, s=2, g=4):
    return Shard(1, tokens, heads, kv_heads, head_dim, head_dim, itemsize=s, grad_itemsize=g)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (32, 8), (4, 1)])
@pytest.mark.parametrize(("s", "g"), [(2, 4), (2, 2), (4, 4)])
def test_bytes_are_the_formulas(size, heads, kv_heads, s, g):
    shard, n = _shard(heads, kv_heads, s=s, g=g), 64 * size
    d, d_kv = heads * 128, kv_heads * 128
    assert forward_bytes(shard, size) == 2 * n * d_kv * s * (size - 1) // size
    hops_of_gradients = 1 if size > 1 else 0  # alone, nothing travels home
    query = (size - 1) * (n // size) * (2 * d * s + 8 * heads) + n * d * g * hops_of_gradients
    kv = 2 * n * d_kv * s * (size - 1) // size + 2 * n * d_kv * g * hops_of_gradients
    assert backward_bytes(shard, size, "query") == query
    assert backward_bytes(shard, size, "kv") == kv


@pytest.mark.parametrize(
    ("heads", "kv_heads", "g", "ratio", "choice"),
    [(32, 32, 2, 0.76, "query"), (32, 32, 4, 0.67, "query"), (32, 8, 2, 3.03, "kv"), (64, 8, 4, 5.38, "kv")],
)
def test_the_paper_saves_with_as_many_kv_heads_and_loses_with_few(heads, kv_heads, g, ratio, choice):
    shard, size = _shard(heads, kv_heads, g=g), 1024  # the ratios are those of a step, without the ends
    assert backward_bytes(shard, size, "query") / backward_bytes(shard, size, "kv") == pytest.approx(
        ratio, abs=0.01
    )
    assert cheaper_backward(shard, size) == choice

"""Packed pre-training with documents between any tokens, beside one process with Megatron's own attention.

Megatron's reference is the dense mask of `--reset-attention-mask` with the positions of
`--reset-position-ids`. The rings get `--dataloader-inter-document-masking`: no mask, no padding.
"""

import random

import pytest
from ranks import on_ranks

pytest.importorskip("megatron.training", reason="megatron.training comes with megatron-core from 0.19 on")
pytest.importorskip("tensorboard")

import prepare_bytes
import torch
from megatron.core.models.common.embeddings import rope_utils
from test_training import BURST, CP2, assert_equal, train

from burst_mcore import Mask
from burst_mcore.layout import positions, shard
from burst_mcore.megatron.layouts import use_layout
from burst_mcore.megatron.packed import _packing

CP4 = ["--context-parallel-size", "4"]
RESET = ["--reset-attention-mask", "--reset-position-ids"]
DOCUMENTS = [*BURST, "--dataloader-inter-document-masking"]
PP2 = ["--pipeline-model-parallel-size", "2", "--micro-batch-size", "1"]  # Megatron packs one sample there
SEGMENT = ["--burst-recompute", "segment", "--burst-recompute-keep", "0.5"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents of 1 to 91 tokens, in samples of 64: many a sample, and some longer than one."""
    draw, prefix = random.Random(0), tmp_path_factory.mktemp("data") / "text"
    texts = [
        bytes(draw.choices(b"abcdefgh ", k=draw.choice((0, 0, 1, 2, 5, 17, 40, 90)))) for _ in range(400)
    ]
    prepare_bytes.write(prefix, iter(texts))
    return ["--data-path", str(prefix), "--data-cache-path", str(prefix.parent / "cache")]


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    return train(tmp_path_factory.mktemp("alone"), 1, data, *RESET)


@pytest.mark.proves(
    "training on documents between any tokens",
    "CP 1, 2, 4; TP 2 x CP 2; three layouts; segments; fused loss",
    versions=("0.19.2",),
)
@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (1, []),
        (2, CP2),
        (2, [*CP2, "--burst-layout", "contiguous", "--burst-fused-loss"]),
        (4, [*CP4, "--burst-layout", "striped", "--burst-backward", "query", *SEGMENT]),
        pytest.param(
            4, [*CP2, "--tensor-model-parallel-size", "2", "--burst-backward", "kv"], marks=pytest.mark.slow
        ),
        pytest.param(4, [*CP4, "--burst-head-parallel", "2"], marks=pytest.mark.slow),
        pytest.param(4, [*CP4, "--micro-batch-size", "4"], marks=pytest.mark.slow),
    ],
    ids=["1", "zigzag", "contiguous, fused", "striped, segments", "tensor", "heads", "four samples a batch"],
)
def test_rings_train_as_one_process(ranks, arguments, data, alone, tmp_path):
    assert_equal(train(tmp_path, ranks, data, *DOCUMENTS, *arguments), alone)


@pytest.mark.proves("training on documents between any tokens", "PP 2 x CP 2 on three layouts")
@pytest.mark.parametrize(
    "layout", ["zigzag", *(pytest.param(word, marks=pytest.mark.slow) for word in ("striped", "contiguous"))]
)
def test_with_pipeline_parallelism(layout, data, tmp_path):
    plain = train(tmp_path / "plain", 2, data, *RESET, *PP2)  # its stages start from seeds of their own
    assert_equal(train(tmp_path / "ring", 4, data, *DOCUMENTS, *PP2, *CP2, "--burst-layout", layout), plain)


class Group:
    """A context-parallel group as far as rotary positions ask."""

    def __init__(self, rank, size):
        self.rank, self.size = (lambda: rank), (lambda: size)


def rotated(seed):
    """Rotary embeddings of packed tokens, sharded by random layouts, against those of one process."""
    draw = random.Random(seed)
    size = draw.choice((2, 3, 4))
    layout = draw.choice(("zigzag", "striped", "contiguous", f"block-striped:{size}"))
    n = 2 * size * size * draw.randint(1, 6)
    ends = sorted({0, n, *(draw.randrange(1, n) for _ in range(draw.randint(0, n // 2)) if n > 1)})
    cu_seqlens = torch.tensor(ends, dtype=torch.int32)
    longest = int(cu_seqlens.diff().max())
    t, freqs = torch.randn(n, 3, 8), torch.randn(longest, 1, 1, 4)
    want = rope_utils._apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, cp_group=Group(0, 1))
    use_layout(layout, packed="whole")
    for rank in range(size):
        local = shard(t, 0, rank=rank, size=size, layout=layout)
        for _ in range(2):  # the second time from memory
            got = rope_utils._apply_rotary_pos_emb_thd(local, cu_seqlens, freqs, cp_group=Group(rank, size))
            assert torch.equal(got, want[positions(n, rank=rank, size=size, layout=layout)])
    with torch.inference_mode():  # such tensors have no version
        fresh = cu_seqlens + 0
        got = rope_utils._apply_rotary_pos_emb_thd(local, fresh, freqs, cp_group=Group(size - 1, size))
        assert torch.equal(got, want[positions(n, rank=size - 1, size=size, layout=layout)])
    cut = cu_seqlens[:-1] if len(cu_seqlens) > 2 else cu_seqlens  # the rest is padding
    padded = rope_utils._apply_rotary_pos_emb_thd(local, cut, freqs[:1], cp_group=Group(size - 1, size))
    assert padded.shape == local.shape
    packing = _packing((cu_seqlens, None, None, None), n, size)
    assert str(packing.layout) == layout
    at = torch.arange(n)
    assert torch.equal(packing.documents.allows(at, at), Mask.documents(ends).allows(at, at))


@on_ranks(1)
def test_every_token_has_its_position_in_its_document(rank, size):
    for seed in range(60):
        rotated(seed)

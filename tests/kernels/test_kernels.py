import logging
import os
import random
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch
from cells import crossed
from dense import (
    ALTERNATING,
    dense,
    error,
    pattern_of,
    problem,
    share_score,
    single_kernel,
)
from masks import MASKS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from burst_mcore import BurstConfig, Mask, Topology, packages
from burst_mcore.attention.geometry.pattern import Pattern
from burst_mcore.attention.geometry.shard import Ranks
from burst_mcore.attention.geometry.tiles import Launches, tiles_of
from burst_mcore.attention.kernels.kernel import BackwardInputs, Problem, Scores
from burst_mcore.attention.kernels.table import KERNELS, choose, taking_delta
from burst_mcore.attention.request import Options, request_of, shard_of
from burst_mcore.attention.resolve import call_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ON_CPU = ("reference", "aten-cpu")


def _ask(**fields):
    return replace(Problem("cpu", torch.float32, 4, 4, 16, 16), **fields)


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("kind", ["causal", "full"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_kernel_equals_float64_within_its_dtype(name, kind, kv_heads, dtype):
    p = problem(0, 48, batch=2, kv_heads=kv_heads, dtype=dtype)
    got = single_kernel(p, KERNELS[name], MASKS[kind])
    bound = 8 * torch.finfo(dtype).eps
    want = dense(p, MASKS[kind])
    for name_, g, w in zip(got._fields, got, want, strict=True):
        assert error(g, w) < bound, name_


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("mask", [Mask.causal(), Mask.full(), Mask.window(20, 3)], ids=str)
@pytest.mark.parametrize("score", [1000.0, ALTERNATING], ids=["all", "every other"])
def test_weights_of_keys_that_share_a_large_score_add_up_to_one(name, mask, score):
    p = problem(1, 48, kv_heads=2, dtype=torch.float32)
    p = share_score(p._replace(q=p.q.round(), k=p.k.round(), v=torch.ones_like(p.v)), score)  # exact scores
    out, lse = KERNELS[name].forward(*p[:3], pattern_of(mask, 48), Scores(0.25))
    assert (out - 1).abs().max() < 1e-6
    want = dense(p, mask).lse.transpose(1, 2)
    assert lse.dtype == torch.float64 and (lse - want).abs().max() < 2e-6  # float32 rounds by 3e-5


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("size", [1e2, 1e4, 1e10, 1e20])
def test_keys_behind_a_row_change_nothing_however_large_they_are(name, size):
    p = problem(1, 48, kv_heads=2, dtype=torch.float32)
    p.dout[:, 32:] = 0
    want = single_kernel(p, KERNELS[name], Mask.causal())
    p.k[:, 32:] = size
    got = single_kernel(p, KERNELS[name], Mask.causal())
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g[:, :32], w[:, :32].to(g.dtype), rtol=1e-5, atol=2e-6)


def _lost(names):
    """Keys, dtype, mask and input of which NaN does not come to every result that depends on it."""
    lost = []
    for keys, dtype, kind, which in product((*range(1, 34), 48), DTYPES, ("causal", "full"), "qk"):
        p = problem(0, keys, heads=2, kv_heads=1, head_dim=8, dtype=dtype)
        getattr(p, which).fill_(torch.nan)
        for name in names:
            got = single_kernel(p, KERNELS[name], MASKS[kind])
            if not all(bool(x.isnan().all()) for x in got):
                lost.append((name, keys, dtype, kind, which))
    return lost


@pytest.mark.parametrize("vectors", crossed(("default", "avx2", "avx512"), quick=lambda x: x == "default"))
def test_no_kernel_loses_nan_in_a_tile_of_few_keys(vectors):
    """torch's own gives zeros where its vectors are wider than the tile."""
    if vectors == "avx512" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this CPU has no AVX-512")
    program = f"import test_kernels; print(test_kernels._lost({ON_CPU}))"
    env = {**os.environ, "ATEN_CPU_CAPABILITY": vectors, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout[-2000:] + done.stderr[-2000:]


@pytest.fixture
def hopper(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(packages, "capability", lambda: (9, 0))
    choose.cache_clear()
    yield
    choose.cache_clear()


def test_auto_takes_first_the_kernels_whose_launches_are_large_and_says_so(hopper, caplog):
    ask = _ask(device="cuda", dtype=torch.bfloat16, head_dim=128, value_dim=128)
    sparse = replace(ask, launches=Launches(alone=14, windows=14, packed=14, whole=26))
    window = replace(ask, launches=Launches(alone=17, windows=26, packed=26, whole=26))
    with caplog.at_level(logging.INFO, logger="burst_mcore"):
        assert choose("auto", ask).name == "cudnn"  # the first of those that are here
        assert "by the launches" not in caplog.records[-1].message
        assert choose("auto", sparse).name == "triton"
        assert "by the launches that this mask leaves: 2^26 pairs a launch" in caplog.records[-1].message
        assert choose("auto", replace(sparse, dtype=torch.float64)).name == "reference"
        assert "triton: dtype torch.float64" in caplog.records[-1].message
        assert choose("auto", window).name == "aten-flash"
        assert "2^26 pairs a launch, others 2^17" in caplog.records[-1].message
        assert "flash3:" in caplog.records[-1].message
        assert choose("auto", replace(window, dtype=torch.float64)).name == "reference"
        assert "triton:" in caplog.records[-1].message
        assert choose("auto", replace(window, dtype=torch.float32)).name == "triton"
    assert choose("cudnn", sparse).name == "cudnn"  # as asked
    assert choose("auto", _ask(launches=sparse.launches)).name == "aten-cpu"
    assert taking_delta("auto", sparse).name == "triton"


ON_GPU = {
    Mask.causal(): "cudnn",
    Mask.window(8, 0): "aten-flash",
    Mask.window(8, 0) & Mask.documents([0, 20, 64]): "aten-flash",
    Mask.window(None, 5): "cudnn",
    Mask.causal() & Mask.documents([0, 20, 64]): "aten-flash",
    Mask.causal() & Mask.dilated(20, 3): "triton",
    Mask.blocks(torch.eye(4, dtype=torch.bool), 16): "aten-flash",
    Mask.blocks(torch.arange(64).view(8, 8) % 3 == 0, 8): "triton",
}


def _request(mask, config, tokens=64):
    shard = shard_of((1, tokens, 4, 128), 4, 128, torch.bfloat16, config.grad_dtype)
    return request_of(shard, "cuda", Options(Topology.single(), mask, config), sinks=False)


@pytest.mark.parametrize(("mask", "name"), ON_GPU.items(), ids=str)
def test_a_call_on_a_gpu_knows_what_its_mask_is_like(hopper, mask, name):
    assert call_of.__wrapped__(_request(mask, BurstConfig()), (64,)).kernel.name == name


def _packings(steps, n):
    """Masks of packed documents, as a data loader makes them: other lengths in every step."""
    draw = random.Random(0)
    for _ in range(steps):
        ends = sorted({0, n, *(draw.randrange(64, n) for _ in range(6))})
        yield Mask.causal() & Mask.documents(ends)


def _shapes_planned(masks, n, kernel="auto"):
    """The shapes of all tiles of forwards that go to kernels which plan for each new shape."""
    shapes, config = set(), BurstConfig(kernel=kernel, ring="flat")
    for mask in masks:
        request = replace(_request(mask, config, n // 4), rank=1, ranks=Ranks(4, 4))
        call = call_of.__wrapped__(request, (n // 4,) * 4)
        if call.kernel.name == "cudnn":
            each = [tiles_of(call.plan, 1, source, call.kernel.abilities) for source in range(4)]
            patterns = [tile.pattern for tiles in each for tile in tiles]
            shapes |= {(*pattern.shape, pattern.causal) for pattern in patterns}
    return shapes


def test_no_step_of_packed_documents_brings_a_shape_that_is_planned_anew(hopper, monkeypatch):
    n = 2**16
    assert len(_shapes_planned([Mask.causal()] * 8, n)) == 3  # cuDNN's, the same in every step
    assert _shapes_planned(_packings(8, n), n) == set()
    with pytest.raises(ValueError, match="documents give its tiles new shapes.*'aten-flash', 'flash2'"):
        _shapes_planned(_packings(1, n), n, "cudnn")
    anyway = replace(KERNELS["cudnn"], supports=lambda problem: None)
    monkeypatch.setitem(KERNELS, "cudnn", anyway)
    assert len(_shapes_planned(_packings(8, n), n, "cudnn")) > 8 * 3  # what is refused


HALF = {"device": "cuda", "dtype": torch.float16}


@pytest.mark.parametrize(
    ("name", "ask", "words"),
    [
        ("flash9", {}, "unknown kernel 'flash9'.*reference"),
        ("cudnn", {}, "cudnn.*on cpu, not on cuda"),
        ("aten-flash", {"device": "cuda"}, "float32"),
        ("aten-flash", {**HALF, "head_dim": 20, "value_dim": 20}, "head dim 20"),
        ("cudnn", {**HALF, "head_dim": 256, "value_dim": 256}, "up to 128"),
        ("aten-cpu", {"softcap": True}, "softcap"),
        ("cudnn", {**HALF, "deterministic": True}, "deterministic"),
        ("aten-flash", {**HALF, "deterministic": True}, "may be another in backward"),
        ("aten-cpu", {"device": "cuda"}, "not on cpu"),
        ("reference", {"dtype": torch.int32}, "int32"),
    ],
)
def test_a_kernel_that_cannot_serve_says_why(name, ask, words):
    with pytest.raises(ValueError, match=words):
        choose(name, _ask(**ask))


class Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("tile", [Pattern((64, 64), high=0), Pattern((41, 1))], ids=["square", "thin"])
@pytest.mark.parametrize("name", ["cudnn", "aten-flash"])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_cuda_kernels_call_their_operators_with_what_those_take(name, kv_heads, tile):
    # Shapes and signatures only, on tensors without data: no GPU is needed, and no number is checked.
    called, small = Operators(), min(tile.shape) < 64
    with FakeTensorMode(allow_non_fake_inputs=True), called:
        rows, columns = tile.shape
        q = torch.empty(2, rows, 8, 64, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(2, columns, kv_heads, 64, dtype=torch.bfloat16, device="cuda")
        out, lse = KERNELS[name].forward(q, k, k, tile, Scores(0.1))
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 8, rows), torch.float32)
        gradients = KERNELS[name].backward(BackwardInputs(q, q, k, k, out, lse, lse), tile, Scores(0.1))
        assert [x.shape for x in gradients] == [q.shape, k.shape, k.shape]
    word = "cudnn_attention" if name == "cudnn" and not small else "_flash_attention"
    assert [word in each for each in called.names if "attention" in each] == [True, True]

"""What is not legal is refused before any communication; ranks that disagree all get an error, none hangs."""

import os
import signal
import threading
import time

import limits
import numpy as np
import pytest
import torch
import torch.distributed as dist
from calling_path import BAR, calling_path, lines_run
from dense import problem
from ranks import processes
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import Shard, distribute_tensor

from burst_mcore import BurstConfig, Latent, Mask, Topology, burst_attention
from burst_mcore.agreement import Agreement
from burst_mcore.attention.agree import agreement_of


def _attend(
    q=(1, 8, 4, 16), k=None, v=None, topology=None, mask=None, dtype=torch.float32, kv_dtype=None, **rest
):
    k = q if k is None else k
    v = k if v is None else v
    dtypes = (dtype, kv_dtype or dtype, dtype)
    tensors = [torch.randn(*shape).to(d) for shape, d in zip((q, k, v), dtypes, strict=True)]
    if rest.pop("requires_grad", False):
        tensors[0].requires_grad_()
    return burst_attention(
        *tensors, topology=topology or Topology.single(), mask=Mask.causal() if mask is None else mask, **rest
    )


RING = Topology(rank=1, size=4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"mask": Mask.documents([0, 9])}, "documents of the mask end at 9.*8 tokens"),
        ({"mask": Mask.blocks([[True]], 4)}, r"must be \[2, 2\], got \[1, 1\]"),
        ({"mask": Mask.ranges([(0, 4)], [(2, 12)])}, "beyond the sequence of 8"),
        ({"topology": RING, "config": BurstConfig(layout="block-striped:6")}, "multiple of 4"),
        ({"q": (8, 4, 16)}, r"q must be a tensor \[batch.*got \(8, 4, 16\)"),
        ({"q": (1, 0, 4, 16)}, r"\(1, 0, 4, 16\)"),
        ({"k": (1, 6, 4, 16)}, "same batch and local sequence"),
        ({"k": (2, 8, 4, 16)}, "same batch"),
        ({"k": (1, 8, 3, 16)}, "same number of heads, and it must divide"),
        ({"k": (1, 8, 2, 16), "v": (1, 8, 4, 16)}, "same number of heads"),
        ({"k": (1, 8, 4, 8)}, "same head_dim"),
        ({"kv_dtype": torch.bfloat16}, "one dtype.*float32, torch.bfloat16"),
        ({"dtype": torch.int64}, "float32.*int64"),
        ({"softmax_scale": float("nan")}, "finite"),
        ({"softmax_scale": 0.0}, "positive"),
        ({"topology": RING}, "ring of 4 ranks needs its process group"),
        (
            {"topology": RING, "config": BurstConfig(head_parallel=3)},
            r"head_parallel=3 is not legal with 4 heads, 4 K/V heads and 4 ranks, 4 a node: it does not "
            r"divide the 4 ranks; legal: \[1, 2, 4\]",
        ),
        (
            {"topology": RING, "q": (1, 8, 6, 16), "config": BurstConfig(head_parallel=4)},
            r"6 heads do not divide by 4; legal: \[1, 2\]",
        ),
        (
            {
                "topology": Topology(rank=1, size=12, intra_size=6),
                "q": (1, 8, 12, 16),
                "config": BurstConfig(head_parallel=8),
            },
            r"12 ranks, 6 a node: it does not divide the 12 ranks; legal: \[1, 2, 3, 4, 6, 12\]",
        ),
        (
            {
                "topology": RING,
                "q": (1, 8, 12, 16),
                "k": (1, 8, 6, 16),
                "config": BurstConfig(head_parallel=4),
            },
            r"6 K/V heads and 4 do not divide one another; legal: \[1, 2\]",
        ),
        ({"config": BurstConfig(head_parallel=2)}, r"does not divide the 1 ranks; legal: \[1\]"),
        ({"mask": "causal"}, r"got 'causal': Mask.causal\(\)"),
        ({"mask": torch.ones(8, 8)}, r"got a tensor \[8, 8\]: Mask.causal"),
        ({"config": {"layout": "zigzag"}}, "BurstConfig"),
        ({"config": BurstConfig(kernel="flash9")}, "unknown kernel 'flash9'; legal"),
        ({"config": BurstConfig(kernel="cudnn")}, "cudnn.*not on cuda"),
        ({"topology": "world"}, "Topology.single"),
        ({"mask": [Mask.causal()] * 40}, r"mask must be a Mask, got \[Mask.*\.\.\.: Mask.causal"),
        ({"topology": ["node 0\n"] * 40}, r"got \['node 0.*\.\.\.: Topology.from_group"),
        ({"config": "layout=zigzag, " * 40}, r"config must be a BurstConfig, got '.*\.\.\.$"),
        ({"softmax_scale": 10**400}, r"softmax_scale must be positive and finite, got 10000*\.\.\.$"),
        ({"softcap": 10**5000}, "softcap must be positive and finite, got a huge int$"),
        ({"softmax_scale": torch.ones(64, 64)}, r"finite, got a tensor \[64, 64\]$"),
        ({"sinks": [0.5] * 400}, r"here \[4\], got \[0.5, .*\.\.\.$"),
    ],
)
def test_bad_arguments(call, words):
    with pytest.raises(ValueError, match=words) as caught:
        _attend(**call)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"is_causal": True}, r"is_causal: write burst_attention\(..., mask=Mask.causal\(\)\)"),
        ({"causal": True}, r"causal: write .*mask=Mask.causal\(\)\)"),
        ({"window_size": (8, 0)}, r"window_size: write .*& Mask.window\(left, 0\)"),
        (
            {"cu_seqlens_q": None, "max_seqlen_q": 4},
            r"cu_seqlens_q: write .*Mask.documents\(cu_seqlens\).*; max_seqlen_q: write .*",
        ),
        ({"attn_mask": torch.ones(8, 8)}, "attn_mask: write .*mask=Mask.causal.*Mask.blocks"),
        ({"alibi_slopes": None}, "alibi_slopes: biases of scores are not served"),
        ({"attn_bias": None}, "attn_bias: biases of scores are not served"),
        ({"dropout_p": 0.1}, "dropout_p: scores are never dropped out"),
        ({"dropout": 0.1}, "dropout: scores are never dropped out"),
        ({"scale": 0.1}, "scale: write .*softmax_scale="),
        ({"deterministic": True}, r"deterministic: write .*config=BurstConfig\(deterministic=...\)"),
        ({"layout": "zigzag"}, r"layout: write .*config=BurstConfig\(layout=...\)"),
        ({"softmax_scal": 1.0}, r"softmax_scal: did you mean softmax_scale\?$"),
        ({"colour": 1}, "colour: legal are q, k, v, topology, mask, .*, return_lse, return_max_logit$"),
    ],
)
def test_arguments_of_other_packages_are_answered_with_ours(names, words):
    with pytest.raises(TypeError, match=f"^burst_attention has no argument {words}") as caught:
        _attend(**names)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"causal": True}, r"causal: write burst_attention\(..., mask=Mask.causal\(\)\)$"),
        ({"softmax_scale": 1.0}, r"softmax_scale: write burst_attention\(..., softmax_scale=...\)$"),
        ({"head_paralel": 2}, r"head_paralel: did you mean head_parallel\?$"),
        ({"sm_margin": 4}, "sm_margin: it is removed; write max_ctas=..., the multiprocessors .* may take$"),
        ({"mesh": "2x2"}, "mesh: it is removed; write ring='direct' or head_parallel='auto', which also .*"),
        ({"colour": 1}, "colour: legal are layout, backward, ring, .*max_ctas$"),
    ],
)
def test_settings_that_are_none_are_answered_with_ours(names, words):
    with pytest.raises(TypeError, match=f"^BurstConfig has no argument {words}"):
        BurstConfig(**names)


def test_numbers_of_numpy_are_numbers():
    q = torch.randn(1, 8, 4, 16)
    want = burst_attention(
        q, q, q, topology=Topology.single(), mask=Mask.causal(), softmax_scale=0.5, softcap=3
    )
    for scale, cap in ((np.float32(0.5), np.float16(3)), (np.float64(0.5), np.int64(3))):
        options = {"softmax_scale": scale, "softcap": cap}
        got = burst_attention(q, q, q, topology=Topology.single(), mask=Mask.causal(), **options)
        assert torch.equal(got, want)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("name", ["q", "k", "sinks", "latent.compressed", "latent.weight"])
def test_nested_tensors_are_refused_by_name(layout, name):
    nested = torch.nested.nested_tensor([torch.ones(5, 4, 16), torch.ones(3, 4, 16)], layout=layout)
    q = torch.ones(1, 8, 4, 16)
    tensors = {"q": q, "k": q, "v": q, "sinks": torch.ones(4)}
    if name.startswith("latent"):
        parts = {
            "compressed": torch.ones(1, 8, 8),
            "rope_key": torch.ones(1, 8, 1, 4),
            "weight": torch.ones(4, 8, 28),
        }
        latent = Latent(**{**parts, name.removeprefix("latent."): nested})
        tensors = {"q": q, "latent": latent}
    else:
        tensors[name] = nested
    with pytest.raises(ValueError, match=f"^{name} is a nested tensor: .*Mask.documents"):
        burst_attention(**tensors, topology=Topology.single(), mask=Mask.causal())


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_casts_as_it_does_for_torchs_attention(compiled):
    def attend(q, k, v):
        return burst_attention(q, k, v, topology=topology, mask=causal)

    topology, causal = Topology.single(), Mask.causal()
    run = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    inputs = [torch.randn(1, 8, 4, 16, requires_grad=True) for _ in range(3)]
    halves = [x.detach().bfloat16().requires_grad_() for x in inputs]
    want = attend(*halves)
    want.float().square().sum().backward()
    for dtypes in ([torch.float32] * 3, [torch.float32, torch.bfloat16, torch.float32]):
        given = [x.detach().to(dtype).requires_grad_() for x, dtype in zip(inputs, dtypes, strict=True)]
        with torch.autocast("cpu", torch.bfloat16):
            out = run(*given)
            theirs = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in given))
        assert out.dtype == theirs.dtype == torch.bfloat16 and torch.equal(out, want)
        out.float().square().sum().backward()
        for x, half, dtype in zip(given, halves, dtypes, strict=True):
            assert x.grad.dtype == dtype and torch.equal(x.grad, half.grad.to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        double = [x.detach().double() for x in inputs]
        assert run(*double).dtype == torch.float64
        theirs = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in double))
        assert theirs.dtype == torch.float64


def test_autocast_casts_a_latent():
    q, compressed, rope = torch.randn(1, 8, 4, 16), torch.randn(1, 8, 8), torch.randn(1, 8, 1, 4)
    weight = torch.randn(4, 8, 28, requires_grad=True)

    def attend(*parts):
        latent = Latent(*parts[1:])
        return burst_attention(parts[0], latent=latent, topology=Topology.single(), mask=Mask.causal())

    parts = q, compressed, rope, weight
    want = attend(*(x.bfloat16() for x in parts))
    with torch.autocast("cpu", torch.bfloat16):
        got = attend(*parts)
    assert torch.equal(got, want)
    (gradient,) = torch.autograd.grad(got.float().sum(), weight)
    assert gradient.dtype == torch.float32


def _written_to(rank, size):
    """The output may be written to; where backward needs it torch says so, as of its own attention."""
    topology = Topology.from_group(dist.group.WORLD) if size > 1 else Topology.single()
    q, k, v = (torch.randn(1, 8 - rank, 4, 16, requires_grad=True) for _ in range(3))
    config = BurstConfig(layout="contiguous")
    out = burst_attention(q, k, v, topology=topology, mask=Mask.causal(), config=config)
    want = 2 * out.detach()
    out.mul_(2)
    assert torch.equal(out, want)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    out = burst_attention(q, k, v, topology=topology, mask=Mask.causal(), config=config) * 1
    torch.nn.functional.dropout(out, 0.5, inplace=True).sum().backward()
    return all(bool(x.grad.isfinite().all()) for x in (q, k, v))


@pytest.mark.parametrize("size", [1, 2])
def test_an_output_may_be_written_to(size):
    assert all(processes(size, _written_to))


def _of_a_dual(function, q):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(q, torch.ones_like(q)))


FORWARD_MODE = {
    "jvp": lambda function, q: torch.func.jvp(function, (q,), (torch.ones_like(q),)),
    "linearize": lambda function, q: torch.func.linearize(function, q),
    "make_dual": lambda function, q: _of_a_dual(function, q),
}
ONCE = "burst_attention can be differentiated once"
NOT_SERVED = {  # and what is said: by us, or, where torch stops before it comes to us, by torch
    "jacfwd": (lambda function, q: torch.func.jacfwd(function)(q), "q has a tangent.*forward-mode"),
    "func.grad": (
        lambda function, q: torch.func.grad(lambda x: function(x).sum())(q),
        "functorch transforms",
    ),
    "vmap": (lambda function, q: torch.vmap(function)(q[None]), "functorch transforms"),
    "hessian": (
        lambda function, q: torch.autograd.functional.hessian(lambda x: function(x).sum(), q),
        ONCE,
    ),
    "double backward": (
        lambda function, q: torch.autograd.functional.jvp(function, q, torch.ones_like(q)),
        ONCE,
    ),
}


def _asked_of_torch(rank, size):
    p = problem(0, 8, dtype=torch.float32)

    def attend(q):
        return burst_attention(q, p.k, p.v, topology=Topology.single(), mask=Mask.causal())

    def attend_with(sinks):
        causal, alone = Mask.causal(), Topology.single()
        return burst_attention(p.q, p.k, p.v, topology=alone, mask=causal, sinks=sinks)

    for ask in FORWARD_MODE.values():
        with pytest.raises(ValueError, match="q has a tangent.*forward-mode"):
            ask(attend, p.q)
        with pytest.raises(ValueError, match="sinks has a tangent.*forward-mode"):
            ask(attend_with, torch.zeros(p.q.shape[2]))
    for name, (ask, words) in NOT_SERVED.items():
        with pytest.raises((RuntimeError, ValueError), match=words):
            ask(attend, p.q)
            raise AssertionError(f"{name} is not served, and no error")
    sharded = distribute_tensor(p.q.detach(), init_device_mesh("cpu", (size,)), [Shard(1)])
    with pytest.raises(ValueError, match=r"q is a DTensor: give the shard of this rank, q.to_local\(\)"):
        attend(sharded)


def test_derivatives_that_are_not_served_are_errors():
    processes(1, _asked_of_torch)


def test_tensors_must_be_dense():
    with pytest.raises(ValueError, match="k must be a dense tensor.*sparse_coo"):
        q = torch.ones(1, 8, 4, 16)
        burst_attention(q, q.to_sparse(), q, topology=Topology.single(), mask=Mask.causal())


def test_a_softcap_of_0_is_none_and_long_windows_are_clipped():
    p = problem(0, 8, dtype=torch.float32)

    def attend(mask, softcap):
        return burst_attention(p.q, p.k, p.v, topology=Topology.single(), mask=mask, softcap=softcap)

    plain = attend(Mask.causal(), None)
    for window in (Mask.window(8, 0), Mask.window(4095, 0), Mask.causal() & Mask.window(7, 99)):
        assert torch.equal(attend(window, 0.0), plain)
    both = Mask.full()
    assert torch.equal(attend(Mask.window(10**12, 10**12), None), attend(both, None))
    with pytest.raises(ValueError, match="softcap must be positive"):
        attend(both, -1.0)


def test_topology_has_no_default():
    with pytest.raises(TypeError, match="topology"):
        burst_attention(*problem(0, 8)[:3], mask=Mask.causal())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layout": "spiral"}, "spiral.*zigzag"),
        ({"backward": "dq"}, "dq.*query.*kv"),
        ({"kernel": None}, "kernel"),
        ({"grad_dtype": torch.float16}, "grad_dtype.*float16"),
        ({"ring": "star"}, "star.*double.*flat"),
        ({"overlap": 1}, "overlap must be True or False, got 1"),
        ({"head_parallel": 0}, "head_parallel.*>= 1.*got 0"),
        ({"head_parallel": "many"}, "'auto', got 'many'"),
        ({"head_parallel": True}, "head_parallel.*got True"),
    ],
)
def test_bad_config(fields, words):
    with pytest.raises(ValueError, match=words):
        BurstConfig(**fields)


def test_bad_mask_and_topology():
    with pytest.raises(ValueError, match="diagonal.*causal"):
        Mask(("diagonal",))
    with pytest.raises(ValueError, match="group.WORLD"):
        Topology.from_group(None)


def test_a_second_derivative_is_refused():
    q, k, v, _ = (x.requires_grad_() for x in problem(0, 8))
    out = burst_attention(q, k, v, topology=Topology.single(), mask=Mask.causal())
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="burst_attention can be differentiated once"):
        dq.sum().backward()


def _disagree(rank, size):
    """Rank 1 does something else, again and again; the message that each rank gets, and after how long.

    Right calls work before and afterwards, but for the first.
    """
    topology = Topology.from_group(dist.group.WORLD)
    odd = rank == 1
    calls = {
        "first": {"q": (1, 16 if odd else 8, 4, 16)},
        "length": {"q": (1, 16 if odd else 8, 4, 16)},
        "short": {"q": (1, 7 if odd else 8, 4, 16)},
        "shape": {"q": (2 if odd else 1, 8, 4, 16)},
        "documents": {"mask": Mask.documents([0, 30])},
        "dtype": {"dtype": torch.bfloat16 if odd else torch.float32},
        "mask": {"mask": Mask.full() if odd else Mask.causal()},
        "scale": {"softmax_scale": 0.5 if odd else 0.25},
        "backward": {"config": BurstConfig(backward="kv" if odd else "query")},
        "layout": {"config": BurstConfig(layout="contiguous" if odd else "zigzag")},
        "kernel": {"config": BurstConfig(kernel="reference" if odd else "aten-cpu")},
        "grad_dtype": {"config": BurstConfig(grad_dtype=torch.bfloat16 if odd else torch.float32)},
        "ring": {"config": BurstConfig(ring="flat" if odd else "double")},
        "overlap": {"config": BurstConfig(overlap=not odd)},
        "head_parallel": {"config": BurstConfig(head_parallel=3 if odd else 1), "q": (1, 8, 6, 16)},
        "auto": {"config": BurstConfig(head_parallel="auto" if odd else 1)},
        "topology": {"topology": Topology.from_group(dist.group.WORLD, intra_size=1 if odd else 3)},
        "lse": {"return_lse": odd},
        "gradient": {"requires_grad": odd},
        "refusal": {"q": (1, 8, 0 if odd else 4, 16)},
        "nonsense": {"softmax_scale": [1] if odd else 1.0},
    }
    found = {}
    for what, call in calls.items():
        start = time.monotonic()
        with pytest.raises((ValueError, TypeError)) as caught:
            _attend(**{"topology": topology, **call})
        found[what] = str(caught.value), time.monotonic() - start
        _attend(topology=topology)  # signatures known to everyone: a later call must be caught as well
    return found


@pytest.fixture(scope="module")
def disagreements():
    """(message, seconds) by rank, by what rank 1 does."""
    ranks = processes(3, _disagree)
    return {what: [found[what] for found in ranks] for what in ranks[0]}


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("first", ["hold [8, 16, 8] tokens, 32 in all", "zigzag on 3 ranks shards them as [8, 12, 12]"]),
        ("length", ["hold [8, 16, 8] tokens, 32 in all", "zigzag on 3 ranks shards them as [8, 12, 12]"]),
        ("short", ["hold [8, 7, 8] tokens, 23 in all", "multiple of 6"]),
        ("shape", ["q: [1, ., 4, 16] on ranks [0, 2], [2, ., 4, 16] on ranks [1]"]),
        ("documents", ["the documents of the mask end at 30", "the sequence has 24 tokens"]),
        ("dtype", ["dtype: torch.float32 on ranks [0, 2], torch.bfloat16 on ranks [1]"]),
        ("mask", ["mask: causal on ranks [0, 2], full on ranks [1]"]),
        ("scale", ["softmax_scale: 0.25 on ranks [0, 2], 0.5 on ranks [1]"]),
        ("backward", ["backward: query on ranks [0, 2], kv on ranks [1]"]),
        ("layout", ["layout: zigzag on ranks [0, 2], contiguous on ranks [1]"]),
        ("kernel", ["kernel: aten-cpu on ranks [0, 2], reference on ranks [1]"]),
        ("grad_dtype", ["grad_dtype: torch.float32 on ranks [0, 2], torch.bfloat16 on ranks [1]"]),
        ("ring", ["ring: double on ranks [0, 2], flat on ranks [1]"]),
        ("overlap", ["overlap: True on ranks [0, 2], False on ranks [1]"]),
        ("head_parallel", ["head_parallel: 1 on ranks [0, 2], 3 on ranks [1]"]),
        ("auto", ["head_parallel: 1 on ranks [0, 2], auto on ranks [1]"]),
        ("topology", ["topology: 1 x 3 on ranks [0, 2], 3 x 1 on ranks [1]"]),
        ("lse", ["lse wanted: False on ranks [0, 2], True on ranks [1]"]),
        ("gradient", ["gradient wanted: False on ranks [0, 2], True on ranks [1]"]),
    ],
)
def test_ranks_that_disagree_all_get_an_error_that_names_ranks_and_fields(what, words, disagreements):
    for message, taken in disagreements[what]:
        assert all(word in message for word in words), message
        assert taken < limits.AT_ONCE


@pytest.mark.parametrize(
    ("what", "words"), [("refusal", r"got (1, 8, 0, 16)"), ("nonsense", "softmax_scale must be positive")]
)
def test_a_rank_that_refuses_tells_the_others_and_the_ring_goes_on(what, words, disagreements):
    messages = disagreements[what]
    assert words in messages[1][0]
    for rank in (0, 2):
        assert "rank 1 of the ring refused this call" in messages[rank][0]
        assert words in messages[rank][0]
        assert messages[rank][1] < limits.AT_ONCE


def _refused_and_went_on(rank, size):
    """Rank 1 refuses its first call and makes its second at once, while rank 0 is still at the first."""
    topology = Topology.from_group(dist.group.WORLD)
    if rank == 1:
        with pytest.raises(ValueError, match="heads"):
            _attend(q=(1, 8, 0, 16), topology=topology)
    else:
        with pytest.raises(ValueError, match="rank 1 of the ring refused this call: ValueError.*heads"):
            _attend(topology=topology)
    return _attend(topology=topology).shape


def test_a_rank_that_goes_on_after_a_refusal_never_meets_another_call():
    assert processes(2, _refused_and_went_on) == [(1, 8, 4, 16)] * 2


def _all_refuse(rank, size):
    topology = Topology.from_group(dist.group.WORLD)
    with pytest.raises(ValueError, match="heads"):
        _attend(q=(1, 8, 0, 16), topology=topology)
    time.sleep(3 * (rank == 1))  # rank 0 waits for rank 1, and must not take an old word for a new refusal
    return _attend(topology=topology).shape


def test_a_refusal_by_all_is_behind_them():
    assert processes(2, _all_refuse) == [(1, 8, 4, 16)] * 2


def _backwards_out_of_order(rank, size):
    topology = Topology.from_group(dist.group.WORLD)
    q, k, v, _ = (x.requires_grad_() for x in problem(0, 8, dtype=torch.float32))
    outs = [burst_attention(q, k, v, topology=topology, mask=Mask.causal()) for _ in range(2)]
    with pytest.raises(ValueError, match="of call: 1 on ranks .0., 2 on ranks .1."):
        outs[rank].sum().backward()


def test_backwards_in_another_order_are_an_error():
    processes(2, _backwards_out_of_order)


def _forward_against_backward(rank, size):
    topology = Topology.from_group(dist.group.WORLD)
    q, k, v, _ = (x.requires_grad_() for x in problem(0, 8, dtype=torch.float32))
    out = burst_attention(q, k, v, topology=topology, mask=Mask.causal())
    with pytest.raises(ValueError, match="pass: forward on ranks .0., backward on ranks .1.") as caught:
        if rank == 0:
            burst_attention(q, k, v, topology=topology, mask=Mask.causal())
        else:
            out.sum().backward()
    return str(caught.value)


def test_a_forward_that_meets_a_backward_is_an_error():
    processes(2, _forward_against_backward)


def _one_goes(rank, size):
    topology = Topology.from_group(dist.group.WORLD)
    dist.barrier()  # rank 0 has made its groups
    if rank == 1:
        dist.destroy_process_group()
        return "gone"
    with pytest.raises(RuntimeError, match="has gone or did not come"):
        _attend(topology=topology)
    return "told"


@pytest.mark.filterwarnings("ignore")
def test_a_rank_that_is_gone_is_an_error_for_the_others():
    assert sorted(processes(2, _one_goes_and_no_barrier)) == ["gone", "told"]


def _one_goes_and_no_barrier(rank, size):
    result = _one_goes(rank, size)
    dist.barrier = lambda: None  # ranks.processes ends with one, and there is nobody left to meet
    return result


class _LostStore:
    """A store whose process has ended."""

    def __init__(self, own):
        self.own = own

    def __getattr__(self, name):
        return getattr(self.own, name)

    def check(self, _):
        raise RuntimeError("Connection reset by peer")


def _the_store_goes(rank, size):
    topology = Topology.from_group(dist.group.WORLD)
    _attend(topology=topology)
    dist.barrier()
    if rank == 1:
        time.sleep(3)  # it does not come
        return "late"
    board = agreement_of(topology)._board
    board.store = _LostStore(board.store)
    with pytest.raises(RuntimeError, match="did not come to this call, before its first hop.*reset by peer"):
        _attend(topology=topology)
    dist.barrier = lambda: None
    return "told"


@pytest.mark.filterwarnings("ignore")
def test_a_store_that_is_gone_is_the_same_error():
    assert processes(2, _the_store_goes_and_no_barrier) == ["told", "late"]


def _the_store_goes_and_no_barrier(rank, size):
    result = _the_store_goes(rank, size)
    dist.barrier = lambda: None
    return result


def _one_goes_while_others_stay(rank, size):
    topology = Topology.from_group(dist.group.WORLD)
    dist.barrier()  # all have made their groups
    dist.barrier = lambda: None  # ranks.processes ends with one
    if rank == 2:
        os._exit(0)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="has gone or did not come"):
        _attend(topology=topology)
    waited, store = time.monotonic() - start, dist.distributed_c10d._get_default_store()
    store.set(f"told {rank}", "")
    limits.keys(store, "told 0", "told 1", "told 3")  # nobody is told by the others' end
    return waited


@pytest.mark.filterwarnings("ignore")
def test_ranks_that_stay_are_told_of_one_that_is_gone():
    with pytest.raises(AssertionError, match=r"ranks \[2\] of 4 ended without an answer") as caught:
        processes(4, _one_goes_while_others_stay)
    assert len(caught.value.args[1]) == 3 and max(caught.value.args[1].values()) < limits.AT_ONCE


def _interrupt_waits(error, *, agreed):
    """Raise the error in the next wait for the agreement: from a signal, or once all have agreed."""

    def ring_out(*_):
        raise error

    if not agreed:
        signal.signal(signal.SIGALRM, ring_out)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        return
    wait = threading.Event.wait

    def waited(self, timeout=None):
        answer = wait(self, timeout)
        if threading.current_thread() is threading.main_thread():
            threading.Event.wait = wait
            ring_out()
        return answer

    threading.Event.wait = waited


def _interrupted(rank, size, who, error, agreed):
    """A rank is interrupted while it waits for the agreement; (message, seconds) of each rank's next call."""
    topology = Topology.from_group(dist.new_group(timeout=limits.OF_A_GROUP), intra_size=size)
    _attend(topology=topology)
    dist.barrier()
    store = _get_default_store()
    if rank == who:
        _interrupt_waits(error, agreed=agreed)
        with pytest.raises(type(error)):
            _attend(topology=topology)
        store.set("left", "")
    elif not agreed:
        limits.keys(store, "left")
    start = time.monotonic()
    with pytest.raises((ValueError, RuntimeError)) as caught:
        _attend(topology=topology)
    dist.barrier = lambda: None  # connections may be closed
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize(
    ("who", "error", "agreed"),
    [
        (0, KeyboardInterrupt(), False),
        (1, KeyboardInterrupt(), False),
        (1, SystemExit(1), False),
        (0, TimeoutError("too late"), False),
        (0, KeyboardInterrupt(), True),
        (1, TimeoutError("too late"), True),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_an_interrupt_while_a_rank_waits_is_told_to_the_others_at_once(who, error, agreed):
    name = type(error).__name__
    for rank, (message, seconds) in enumerate(processes(3, _interrupted, who, error, agreed)):
        words = f"make the process group anew ({name}" if rank == who else f"rank {who} of the ring was inter"
        assert words in message and name in message
        assert seconds < limits.AT_ONCE, "an error that came by the limit of the group"


def _step(topology, size, *, mask=None, dtype=torch.float32, heads=4):
    """One forward and backward."""
    q, k, v, _ = (x.requires_grad_() for x in problem(0, 8, heads=heads, dtype=dtype))
    out = burst_attention(q, k, v, topology=topology, mask=mask or Mask.causal())
    out.sum().backward()
    return q.grad


def _ahead_and_apart(rank, size, what):
    """Backwards that were seen go ahead; then one rank's backward is another than the others'."""
    topology = Topology.from_group(dist.group.WORLD)
    for _ in range(3):
        _step(topology, size)
    q, k, v, _ = (x.requires_grad_() for x in problem(0, 8, dtype=torch.float32))
    outs = [burst_attention(q, k, v, topology=topology, mask=Mask.causal()) for _ in range(2)]
    start = time.monotonic()
    with pytest.raises((ValueError, RuntimeError)) as caught:
        if what == "forward" and rank == 1:
            burst_attention(q, k, v, topology=topology, mask=Mask.causal())
        else:
            outs[rank == 1 and what == "order"].sum().backward()
    taken = time.monotonic() - start
    with pytest.raises((ValueError, RuntimeError), match="make the process group anew"):
        _step(topology, size)
    dist.barrier = lambda: None  # the connections are closed
    return str(caught.value), taken


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("order", "of call: 7 on ranks [0, 2], 8 on ranks [1]"),
        ("forward", "pass: backward on ranks [0, 2], forward on ranks [1]"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_calls_that_went_ahead_apart_are_an_error_on_every_rank(what, words):
    for message, taken in processes(3, _ahead_and_apart, what):
        assert words in message
        assert taken < limits.AT_ONCE


def _looked_at_the_end(rank, size):
    """The last backward of a step needs no message, and differs: `backward` itself raises."""
    topology = Topology.from_group(dist.group.WORLD)
    apart = Mask.documents([0, 4, 8, 12, 16]) & Mask.window(0, 0)
    config = BurstConfig(layout="contiguous")

    def run(scale):
        q, k, v, _ = (x.requires_grad_() for x in problem(0, 8, dtype=torch.float32))
        out = burst_attention(q, k, v, topology=topology, mask=apart, config=config, return_lse=True)
        (out[0].sum() + (scale * out[1].sum() if scale else 0)).backward()

    for scale in (0, 1, 0, 1):
        run(scale)
    with pytest.raises(ValueError, match="gradient through lse: False on ranks .0., True on ranks .1."):
        run(rank)
    dist.barrier = lambda: None


@pytest.mark.filterwarnings("ignore")
def test_the_last_backward_of_a_step_is_looked_at_before_it_returns():
    processes(2, _looked_at_the_end)


def _documents_apart(rank, size):
    """Batches of other documents go ahead; in one the ranks have different documents."""
    topology = Topology.from_group(dist.group.WORLD)
    ends = [[0, 5, 24], [0, 9, 24], [0, 24], [0, 3, 20, 24]]
    for each in ends:
        q, k, v, _ = (x.requires_grad_() for x in problem(0, 8, dtype=torch.float32))
        burst_attention(
            q, k, v, topology=topology, mask=Mask.causal() & Mask.documents(each)
        ).sum().backward()
    looked = []
    meet = Agreement.meet
    Agreement.meet = lambda self, *args, ahead=False, **others: (
        looked.append(ahead) or meet(self, *args, ahead=ahead, **others)
    )
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"mask: .* on ranks \[0, 2\], .* on ranks \[1\]"):
        mask = Mask.causal() & Mask.documents([0, 12, 24] if rank == 1 else [0, 1, 2, 24])
        burst_attention(q, k, v, topology=topology, mask=mask).sum().backward()
    dist.barrier = lambda: None
    assert looked[0]  # went ahead
    return time.monotonic() - start


@pytest.mark.filterwarnings("ignore")
def test_documents_that_differ_in_a_call_that_went_ahead_are_an_error():
    assert max(processes(3, _documents_apart)) < limits.AT_ONCE


def _looked_at_without_gradients(rank, size):
    """A forward that goes ahead, needs no message and has no backward: no later call would tell."""
    topology, config = Topology.from_group(dist.group.WORLD), BurstConfig(layout="contiguous")

    def attend(ends):
        mask = Mask.causal() & Mask.documents(ends)
        return _attend(topology=topology, mask=mask, config=config)

    looked, meet = [], Agreement.meet
    Agreement.meet = lambda self, *args, ahead=False, **others: (
        looked.append(ahead) or meet(self, *args, ahead=ahead, **others)
    )
    for ends in ([0, 8, 16], [0, 4, 8, 16]):
        attend(ends)
    with pytest.raises(ValueError, match="mask: .* on ranks .0., .* on ranks .1."):
        attend([0, 2 + rank, 8, 16])
    dist.barrier = lambda: None
    return looked


@pytest.mark.filterwarnings("ignore")
def test_a_forward_without_gradients_is_looked_at_before_it_returns():
    assert processes(2, _looked_at_without_gradients) == [[False, True, True]] * 2


@pytest.mark.slow  # a time, which other work of the machine adds to
@pytest.mark.parametrize("size", [2, 5, 8])
def test_the_calling_path_takes_a_tenth_of_a_millisecond(size):
    for waiting, ahead in processes(size, calling_path, size):
        assert max(waiting, ahead) < BAR


def test_the_calling_path_does_nothing_for_each_rank():
    (lines,) = {lines for size in (2, 5) for lines in processes(size, lines_run)}
    assert min(lines) > 10

"""What is not legal is refused before any communication, in a line that names it."""

import pytest
import torch
import torch.distributed as dist
from dense import problem
from ranks import on_ranks, processes
from test_latent import case
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from burst_mcore import BurstConfig, Latent, Mask, Topology, burst_attention

ALONE, CAUSAL = Topology.single(), Mask.causal()
RING, NODES = Topology(rank=1, size=4), Topology(rank=1, size=12, intra_size=6)


def attend(q=(1, 8, 4, 16), k=None, v=None, topology=ALONE, mask=CAUSAL, dtypes=(torch.float32,) * 3, **rest):
    """A call on tensors of these shapes."""
    k = q if k is None else k
    shapes = q, k, k if v is None else v
    tensors = [torch.randn(*shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    return burst_attention(*tensors, topology=topology, mask=mask, **rest)


def heads(degree):
    return {"config": BurstConfig(head_parallel=degree)}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"mask": Mask.documents([0, 9])}, "documents of the mask end at 9.*8 tokens"),
        ({"topology": RING, "config": BurstConfig(layout="block-striped:6")}, "multiple of 4"),
        ({"q": (8, 4, 16)}, r"q must be a tensor \[batch.*got \(8, 4, 16\)"),
        ({"q": (1, 0, 4, 16)}, r"\(1, 0, 4, 16\)"),
        ({"k": (1, 6, 4, 16)}, "same batch and local sequence"),
        ({"k": (1, 8, 3, 16)}, "same number of heads, and it must divide"),
        ({"k": (1, 8, 2, 16), "v": (1, 8, 4, 16)}, "same number of heads"),
        ({"k": (1, 8, 4, 8)}, "same head_dim"),
        ({"dtypes": (torch.float32, torch.bfloat16, torch.float32)}, "one dtype.*float32, torch.bfloat16"),
        ({"dtypes": (torch.int64,) * 3}, "float32.*int64"),
        ({"softmax_scale": float("nan")}, "finite"),
        ({"softmax_scale": 0.0}, "positive"),
        ({"topology": RING}, "ring of 4 ranks needs its process group"),
        (
            {"topology": RING, **heads(3)},
            r"head_parallel=3 is not legal with 4 heads, 4 K/V heads and 4 ranks, 4 a node: it does not "
            r"divide the 4 ranks; legal: \[1, 2, 4\]",
        ),
        ({"topology": RING, "q": (1, 8, 6, 16), **heads(4)}, r"6 heads do not divide by 4; legal: \[1, 2\]"),
        (
            {"topology": NODES, "q": (1, 8, 12, 16), **heads(8)},
            r"12 ranks; legal: \[1, 2, 3, 4, 6, 12\]",
        ),
        (
            {"topology": RING, "q": (1, 8, 12, 16), "k": (1, 8, 6, 16), **heads(4)},
            r"6 K/V heads and 4 do not divide one another; legal: \[1, 2\]",
        ),
        ({"mask": torch.ones(8, 8)}, r"got a tensor \[8, 8\]: Mask.causal"),
        ({"mask": [CAUSAL] * 40}, r"mask must be a Mask, got \[Mask.*\.\.\.: Mask.causal"),
        ({"config": BurstConfig(kernel="flash9")}, "unknown kernel 'flash9'; legal"),
        ({"config": BurstConfig(kernel="cudnn")}, "cudnn.*not on cuda"),
        ({"config": "layout=zigzag, " * 40}, r"config must be a BurstConfig, got '.*\.\.\.$"),
        ({"topology": ["node 0\n"] * 40}, r"got \['node 0.*\.\.\.: Topology.from_group"),
        ({"softmax_scale": 10**400}, r"softmax_scale must be positive and finite, got 10000*\.\.\.$"),
        ({"softmax_scale": torch.ones(64, 64)}, r"finite, got a tensor \[64, 64\]$"),
        ({"softcap": 10**5000}, "softcap must be positive and finite, got a huge int$"),
        ({"softcap": -1.0}, "softcap must be positive.*-1.0"),
        ({"softcap": "30"}, "softcap.*'30'"),
        ({"sinks": [0.5] * 400}, r"sinks must be a floating-point tensor.*here \[4\], got \[0.5, .*\.\.\.$"),
        ({"sinks": torch.zeros(3)}, r"sinks must be.*\[heads\], here \[4\], got \(3,\)"),
        ({"sinks": torch.zeros(4, dtype=torch.int64)}, "int64"),
    ],
)
def test_bad_arguments(call, words):
    with pytest.raises(ValueError, match=words) as caught:
        attend(**call)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


C = case(0, 8, dtype=torch.float32)
"""Of multi-latent attention."""
LATENT = Latent(*C[1:4])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"latent": LATENT._replace(rotates="maybe")},
            "rotates must be one of .*got 'maybe'",
        ),
        ({"latent": LATENT._replace(compressed=torch.zeros(1, 8, 1, 24))}, r"R\], got \(1, 8, 1, 24\)"),
        ({"latent": LATENT._replace(compressed=torch.zeros(1, 7, 24))}, "the same batch and local sequence"),
        ({"latent": LATENT._replace(rope_key=torch.zeros(1, 8, 4, 8))}, "the same batch and local sequence"),
        ({"latent": LATENT._replace(rope_key=torch.zeros(1, 8, 1, 24))}, "Dk = head_dim - Dr"),
        ({"latent": LATENT._replace(weight=torch.zeros(4, 24, 16))}, "Dk = head_dim - Dr"),
        ({"latent": LATENT._replace(weight=torch.zeros(2, 24, 32))}, r"\[heads of q, R, Dk \+ Dv\]"),
        ({"latent": LATENT._replace(weight=C.weight.double())}, "one dtype"),
        ({"k": C.q, "v": C.q, "latent": LATENT}, "k and v, or latent, not both"),
        ({"k": C.q}, "needs k and v, or latent.*got no v"),
        ({"latent": tuple(LATENT)}, "must be a Latent.*got tuple"),
        ({"latent": LATENT._replace(rope_key=None)}, "got Tensor, NoneType, Tensor"),
    ],
)
def test_keys_and_values_come_once_and_a_latent_fits(given, words):
    with pytest.raises(ValueError, match=words):
        burst_attention(C.q, topology=ALONE, mask=CAUSAL, **given)


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
        ({"alibi_slopes": None}, "alibi_slopes: biases of scores are not supported"),
        ({"attn_bias": None}, "attn_bias: biases of scores are not supported"),
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
        attend(**names)
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


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged, torch.sparse_coo])
@pytest.mark.parametrize("name", ["k", "sinks", "latent.compressed", "latent.weight"])
def test_tensors_that_are_not_dense_are_refused_by_name(layout, name):
    if layout == torch.sparse_coo:
        other, words = C.q.to_sparse(), f"^{name} must be a dense tensor.*sparse_coo"
    else:
        other = torch.nested.nested_tensor([torch.ones(5, 4, 24), torch.ones(3, 4, 24)], layout=layout)
        words = f"^{name} is a nested tensor: .*Mask.documents"
    if name.startswith("latent"):
        given = {"latent": LATENT._replace(**{name.removeprefix("latent."): other})}
    else:
        given = {"k": C.q, "v": C.q, name: other}
    with pytest.raises(ValueError, match=words):
        burst_attention(C.q, **given, topology=ALONE, mask=CAUSAL)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_casts_as_it_does_for_torchs_attention(compiled):
    def plain(q, k, v):
        return burst_attention(q, k, v, topology=ALONE, mask=CAUSAL)

    run = torch.compile(plain, fullgraph=True, backend="aot_eager") if compiled else plain
    inputs = [torch.randn(1, 8, 4, 16, requires_grad=True) for _ in range(3)]
    halves = [x.detach().bfloat16().requires_grad_() for x in inputs]
    want = plain(*halves)
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
UNSUPPORTED = {  # and what is said: by us, or, where torch stops before it comes to us, by torch
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


@on_ranks(1)
def test_derivatives_that_are_not_supported_are_errors(rank, size):
    p = problem(0, 8, dtype=torch.float32)

    def of_q(q):
        return burst_attention(q, p.k, p.v, topology=ALONE, mask=CAUSAL)

    def of_sinks(sinks):
        return burst_attention(p.q, p.k, p.v, topology=ALONE, mask=CAUSAL, sinks=sinks)

    for ask in FORWARD_MODE.values():
        with pytest.raises(ValueError, match="q has a tangent.*forward-mode"):
            ask(of_q, p.q)
        with pytest.raises(ValueError, match="sinks has a tangent.*forward-mode"):
            ask(of_sinks, torch.zeros(p.q.shape[2]))
    for name, (ask, words) in UNSUPPORTED.items():
        with pytest.raises((RuntimeError, ValueError), match=words):
            ask(of_q, p.q)
            raise AssertionError(f"{name} is not supported, and no error")
    sharded = distribute_tensor(p.q.detach(), init_device_mesh("cpu", (size,)), [Shard(1)])
    with pytest.raises(ValueError, match=r"q is a DTensor: give the shard of this rank, q.to_local\(\)"):
        of_q(sharded)


def test_a_softcap_of_0_is_none_and_long_windows_are_clipped():
    p = problem(0, 8, dtype=torch.float32)

    def of(mask, softcap):
        return burst_attention(p.q, p.k, p.v, topology=ALONE, mask=mask, softcap=softcap)

    plain = of(CAUSAL, None)
    for window in (Mask.window(8, 0), Mask.window(4095, 0), CAUSAL & Mask.window(7, 99)):
        assert torch.equal(of(window, 0.0), plain)
    assert torch.equal(of(Mask.window(10**12, 10**12), None), of(Mask.full(), None))


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

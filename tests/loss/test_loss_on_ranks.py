"""The fused loss over a vocabulary and a sequence that are sharded over ranks equals that of one process."""

import re

import pytest
import torch
import torch.distributed as dist
from heads import distance
from plain_loss import linear_cross_entropy
from ranks import on_ranks, processes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from burst_mcore.loss import fused_linear_cross_entropy
from burst_mcore.loss.checksums import checksum
from burst_mcore.loss.vocabulary import shard

D, S, BATCH = 16, 8, 3


def groups(rank, tp, cp):
    """This rank's groups over the vocabulary (neighbours) and the sequence, None where it is alone."""
    tps = [dist.new_group([c * tp + t for t in range(tp)]) for c in range(cp)]
    cps = [dist.new_group([c * tp + t for c in range(cp)]) for t in range(tp)]
    return tps[rank // tp], cps[rank % tp]


def inputs(v, dtype=torch.float64):
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(2 * S, BATCH, D, generator=make, dtype=torch.float64).to(dtype)
    weight = torch.randn(v, D, generator=make, dtype=torch.float64).to(dtype)
    bias = torch.randn(v, generator=make, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, v, (2 * S, BATCH), generator=make)
    labels[::3] = -100
    weights = torch.rand(2 * S, BATCH, generator=make)
    labels[:S] = torch.where(torch.arange(S)[:, None] % 2 == 0, -100, labels[:S])
    return hidden, weight, labels, weights, bias


OPTIONS = [
    {"reduction": "mean"},
    {"reduction": "mean", "label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0, "temperature": 0.8},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "none", "z_loss": 0.01},
]


def fused(rank, size, tp, cp, v, sequence_parallel, masked, dtype):
    """For each of OPTIONS: this rank's (loss, metrics, gradients of hidden, weight, bias)."""
    tp_group, cp_group = groups(rank, tp, cp)
    c, t = rank // tp, rank % tp
    hidden, weight, labels, weights, bias = inputs(v, dtype)
    if masked:
        labels[: 2 * S // cp] = -100
    mine = slice(c * 2 * S // cp, (c + 1) * 2 * S // cp)
    first, rows = shard(v, tp, t)
    found = []
    for options in OPTIONS:
        h = hidden[mine]
        h = h.chunk(tp)[t] if sequence_parallel else h
        leaves = [
            x.clone().requires_grad_() for x in (h, weight[first : first + rows], bias[first : first + rows])
        ]
        loss, metrics = fused_linear_cross_entropy(
            leaves[0], leaves[1], labels[mine], weights[mine], leaves[2],
            tp_group=tp_group, cp_group=cp_group, sequence_parallel=sequence_parallel, chunk_tokens=5,
            return_metrics=True, **options,
        )  # fmt: skip
        upstream = torch.linspace(-1, 1, 2 * S * BATCH, dtype=loss.dtype).view(2 * S, BATCH)[mine]
        loss.backward(upstream if loss.ndim else None)
        found.append((loss.detach(), *metrics, *(x.grad for x in leaves)))
    return found


def reference(v, labels, given, dtype, **options):
    """(loss, gradients of hidden, weight and bias) of the whole on one process, from values of `given`."""
    hidden, weight, _, weights, bias = inputs(v, given)
    leaves = [x.to(dtype).clone().requires_grad_() for x in (hidden, weight, bias)]
    loss = linear_cross_entropy(leaves[0], leaves[1], labels, weights, leaves[2], **options)
    upstream = torch.linspace(-1, 1, 2 * S * BATCH, dtype=loss.dtype).view(2 * S, BATCH)
    return loss.detach(), *torch.autograd.grad(loss, leaves, upstream if loss.ndim else None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tp", "cp", "v", "sequence_parallel", "masked"),
    [
        (1, 2, 53, False, False),
        (2, 1, 53, True, False),
        (2, 2, 53, True, True),
        (4, 1, 53, False, False),
        (4, 1, 5, True, False),  # 2, 2, 1 and no rows
        pytest.param(4, 2, 64, True, True, marks=pytest.mark.slow),
        pytest.param(4, 2, 53, False, False, marks=pytest.mark.slow),
    ],
)
def test_as_on_one_process(tp, cp, v, sequence_parallel, masked, dtype):
    everyones = processes(tp * cp, fused, tp, cp, v, sequence_parallel, masked, dtype)
    hidden, weight, labels, _, bias = inputs(v, dtype)
    if masked:
        labels[: 2 * S // cp] = -100

    def assert_near(got, want, plain=None):
        """To a few ulp in float64; else at most twice as far as plain PyTorch in this dtype, or to 1 %."""
        bound = 1e-2 if plain is None else 2 * distance(plain, want)
        assert distance(got, want) <= (1e-12 if dtype == torch.float64 else bound)

    for i, options in enumerate(OPTIONS):
        exact, plain = (reference(v, labels, dtype, kind, **options) for kind in (torch.float64, dtype))
        mine = [found[i] for found in everyones]
        by_cp = [mine[c * tp : (c + 1) * tp] for c in range(cp)]
        for ranks in by_cp:  # the same loss and metrics on all of a vocabulary group
            for other in ranks[1:]:
                assert all(torch.equal(a, b) for a, b in zip(ranks[0][:4], other[:4], strict=True))
        losses = [ranks[0][0] for ranks in by_cp]
        loss = torch.cat(losses) if exact[0].ndim else sum(losses)
        assert_near(loss, exact[0], plain[0])
        along = [torch.cat([m[4] for m in ranks]) if sequence_parallel else ranks[0][4] for ranks in by_cp]
        assert_near(torch.cat(along), exact[1], plain[1])
        for which in (5, 6):
            whole = [torch.cat([by_cp[c][t][which] for t in range(tp)]).double() for c in range(cp)]
            assert_near(sum(whole), exact[which - 3], plain[which - 3])
        assert all(x.isfinite().all() for found in mine for x in found)
        z = hidden.double() @ weight.double().t() + bias.double()
        cap = options.get("softcap")
        z = (z if cap is None else cap * torch.tanh(z / cap)) / options.get("temperature", 1.0)
        log_p, seen = torch.log_softmax(z, -1), labels != -100
        for which, metric in (
            (1, log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]),
            (2, -(log_p.exp() * log_p).sum(-1)),
        ):
            got = torch.cat([ranks[0][which] for ranks in by_cp]).double()
            assert_near(got, metric.where(seen, 0.0))
        if dtype == torch.float64:
            got = torch.cat([ranks[0][3] for ranks in by_cp])
            assert torch.equal(got, (z.argmax(-1) == labels) & seen)


MISTAKES = {
    "label": (
        lambda a: a["labels"].__setitem__((1, 1), 64),
        r"labels must be in \[0, 64\) or -100 \(ignore_index\), got 64",
    ),
    "weights": (
        lambda a: a["weights"].__setitem__((0, 0), -1),
        "rank 3: weights must be finite and at least 0",
    ),
    "rows": (
        lambda a: a.update(weight=a["weight"][:-3]),
        r"weights have \[32, 29\] rows by rank of tp_group; 61 must be sharded as \[31, 30\]",
    ),
    "reduction": (
        lambda a: a.update(reduction="sum"),
        r"ranks make different calls: reduction: mean on ranks \[2\], sum on ranks \[3\]",
    ),
    "dtype": (
        lambda a: a.update(hidden=a["hidden"].float(), weight=a["weight"].float()),
        r"ranks make different calls: dtype: .*torch.float32 on ranks \[3\]",
    ),
    "labels differ": (lambda a: a.update(labels=a["labels"].flip(1)), "different calls: .*checksum"),
    "weights differ": (lambda a: a.update(weights=a["weights"].flip(1)), "different calls: .*checksum"),
    "frozen": (
        lambda a: a.update(weight=a["weight"].clone().requires_grad_()),
        r"ranks make different calls: .*require gradients",
    ),
    "no numbers": (
        lambda a: a.update(labels=a["labels"].float().fill_(torch.nan)),
        "rank 3: labels must be int64 or int32, got torch.float32",
    ),
    "tensor": (lambda a: a.update(hidden=None), "rank 3: hidden must be a tensor, got NoneType"),
    "complex weights": (
        lambda a: a.update(weights=a["weights"] + 1j),
        "rank 3: weights must be real numbers, got torch.complex64",
    ),
    "whole weight": (None, "ranks of tp_group hold the same rows of weight"),
}
"""What rank 3 does wrong, or with a label rank 2, too, or all (None), and what everyone is told."""


def mistaken(rank, size):
    """By mistake: the error that each rank gets; in the next call ranks are in step again."""
    tp_group, cp_group = groups(rank, 2, 2)
    hidden, weight, labels, weights, _ = inputs(64)
    first, rows = shard(64, 2, rank % 2)
    mine, said = weight[first : first + rows], {}
    for what, (change, _) in MISTAKES.items():
        given = {"hidden": hidden[:S], "weight": mine, "labels": labels[:S], "weights": weights[:S]}
        if change is None:
            given["weight"] = weight
        elif rank == 3 or (rank == 2 and what == "label"):
            given = {name: x.clone() for name, x in given.items()}
            change(given)
        with pytest.raises(ValueError) as caught:
            fused_linear_cross_entropy(**given, tp_group=tp_group, cp_group=cp_group)
        said[what] = str(caught.value)
        after = fused_linear_cross_entropy(hidden, mine, labels, tp_group=tp_group, cp_group=cp_group)
        assert after.isfinite(), what
    return said


@pytest.fixture(scope="module")
def mistakes():
    """What each rank is told, by mistake: to start ranks takes longer than all of them."""
    return processes(4, mistaken)


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_of_one_rank_is_an_error_of_all(what, mistakes):
    for rank, said in enumerate(mistakes):
        words = MISTAKES[what][1].removeprefix(f"rank {rank}: ")  # as the rank that refuses says
        assert re.search(words, said[what]), said[what]


def outsider(rank, size):
    """What each rank is told where rank 3 is not in the tp_group that it names, but in its cp_group."""
    tp_group, cp_group = dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2, 3])
    hidden, weight, labels, *_ = inputs(60)
    part = weight[20 * rank : 20 * (rank + 1)] if rank < 3 else weight
    with pytest.raises(ValueError) as caught:
        fused_linear_cross_entropy(hidden, part, labels, tp_group=tp_group, cp_group=cp_group)
    return str(caught.value)


def test_a_rank_outside_its_group_is_an_error_of_all():
    for rank, message in enumerate(processes(4, outsider)):
        words = "tp_group must be a process group that this rank is in, or None, got"
        assert message.startswith(words if rank == 3 else f"rank 3: {words}")


def distributed(rank, size):
    """What is said of each argument that is a DTensor, and the loss of the same tensor made whole."""
    mesh = init_device_mesh("cpu", (size,))
    hidden, weight, labels, weights, bias = inputs(20, torch.float32)
    plain = {"hidden": hidden, "weight": weight, "labels": labels, "weights": weights, "bias": bias}
    said = {}
    for name, value in plain.items():
        sharded = distribute_tensor(value, mesh, [Shard(0)])
        with pytest.raises(ValueError) as error:
            fused_linear_cross_entropy(**{**plain, name: sharded})
        whole = fused_linear_cross_entropy(**{**plain, name: sharded.full_tensor()})
        said[name] = str(error.value), torch.equal(whole, fused_linear_cross_entropy(**plain))
    return said


def test_a_dtensor_is_refused_by_the_name_of_its_argument():
    for said in processes(2, distributed):
        for name, (words, equal) in said.items():
            assert f"{name} is a DTensor" in words and f"{name}.full_tensor()" in words and equal


UPSTREAMS = (
    ("none", [1.0, 1, 1, 5], [2.0, 2, 2, 2]),  # the same sum
    ("none", [1.0, 0, 0, 1], [0.0, 1, 1, 0]),
    ("mean", 1.0, 2.0),
)
"""Reductions, and the gradients of two ranks."""


@on_ranks(2)
def test_upstream_gradients_that_differ_are_an_error_of_all(rank, size):
    group = dist.new_group([0, 1])
    for reduction, *upstream in UPSTREAMS:
        hidden, weight, labels = torch.randn(4, D), torch.randn(20, D).requires_grad_(), torch.arange(4)
        part = weight[10 * rank : 10 * (rank + 1)]
        loss = fused_linear_cross_entropy(hidden, part, labels, tp_group=group, reduction=reduction)
        with pytest.raises(RuntimeError, match="differ between ranks of its tp_group"):
            loss.backward(torch.tensor(upstream[rank]))


def test_a_checksum_is_of_values_and_places():
    x = torch.tensor([0.0, 1.0, -2.0, torch.nan, torch.inf])
    alike = x.clone()
    alike[0] = -0.0
    alike[3] = -torch.nan
    assert checksum(x) == checksum(alike)
    assert checksum(x.double()) == checksum(x)
    others = [x.flip(0), x[:4], torch.cat([x, x[:1]]), x.nextafter(torch.zeros(5)), x[[0, 2, 1, 3, 4]]]
    assert len({int(checksum(y)) for y in [x, *others]}) == 6
    assert int(checksum(torch.tensor([]))) == 0
    assert abs(int(checksum(torch.full((1000,), 3)))) < 2**62


def chunked(rank, size):
    """A loss in automatic chunks, of a vocabulary of which ranks hold different parts, and its backward."""
    from burst_mcore.loss import arguments, chunked

    chunked.CHUNK_BYTES = 384 * 26 * 4  # 384 tokens of one rank, 256 of the other: fewer chunks
    alone = []
    arguments.chunk_bytes = lambda device, **how: alone.append(how) or chunked.chunk_bytes(device, **how)
    group = dist.new_group([0, 1])
    torch.manual_seed(0)
    weight, hidden = torch.randn(53, D), torch.randn(1350, D)
    labels = torch.randint(0, 53, (1350,))
    labels[::5] = -100
    first, rows = shard(53, 2, rank)
    mine = weight[first : first + rows].requires_grad_()
    loss = fused_linear_cross_entropy(hidden, mine, labels, tp_group=group, reduction="none")
    upstream = torch.randn(1350)
    loss.backward(upstream)
    assert alone and all(how == {"alone": False} for how in alone)
    whole = weight.clone().requires_grad_()
    linear_cross_entropy(hidden, whole, labels, reduction="none").backward(upstream)
    return distance(mine.grad, whole.grad[first : first + rows])


def test_ranks_with_different_parts_come_to_the_same_chunks():
    assert max(processes(2, chunked)) < 1e-5

"""Cases: what the package does on the devices that are not there, held to the results of one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from dense import Problem, Result, dense, error, problem
from plain_loss import linear_cross_entropy
from torch import Tensor

from burst_mcore import BurstConfig, Mask, burst_attention, shard, unshard
from burst_mcore.attention.numerics.latent import Latent
from burst_mcore.checkpointing import Policy, checkpoint
from burst_mcore.loss import fused_linear_cross_entropy

from . import ranks
from .clocks import CHECKER
from .tensors import launch

TOKENS = 24
"""Of a rank."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
MASKS = {
    "causal": lambda n: Mask.causal(),
    "full": lambda n: Mask.full(),
    "window": lambda n: Mask.window(n // 3, 0),
    "documents": lambda n: Mask.causal() & Mask.documents([0, n // 5, n // 2 + 3, n]),
    "dilated": lambda n: Mask.causal() & Mask.dilated(12, 3),
}


def findings(
    size: int, results: dict[int, list[Tensor]], wanted: Callable[[], Any], *, waits: int = 0
) -> Counter[str]:
    """Return what was found in a case; with all results there, also where their values are wrong."""
    found = Counter(CHECKER.findings)
    for rank in range(size) if len(results) == size else ():
        reasons = Counter({k: n for k, n in CHECKER.syncs[rank].items() if not k.startswith("barrier")})
        if reasons.total() != waits:
            found[f"wait: rank {rank} waits {reasons.total()} times, not {waits}: {dict(reasons)}"] += 1
    if len(results) == size and not found:
        values = wanted()
        assert values, "a case compares values"
        for name, (got, want, tolerance) in values.items():
            if not error(got, want) <= tolerance:
                found[f"values: {name} has an error of {error(got, want):.1e}"] += 1
    return found


def attention(
    size: int,
    kernel: str = "triton",
    mask: str = "causal",
    *,
    intra: int | None = None,
    dtype: torch.dtype | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    steps: int = 2,
    world: int | None = None,
    bound: bool = False,
    lse: bool = False,
    latent: str = "",
    **config: Any,
) -> Counter[str]:
    """Some steps of one attention call on a ring, each with its backward.

    The last is counted: see `counts`. latent: how it rotates, if K and V are made of one.
    """
    dtype = dtype or (torch.float32 if kernel == "triton" else torch.bfloat16)
    settings, n = BurstConfig(kernel=kernel, **config), TOKENS * size
    p, of_mask, want = _dense(n, heads, kv_heads, head_dim, dtype, mask, lse)
    mla = _latents(n, heads, dtype) if latent else ()
    part_of = partial(shard, dim=1, size=size, layout=settings.layout)
    FORWARD.clear()
    BACKWARD.clear()

    def rank(me: int) -> list[Tensor]:
        topology = ranks.ring(me, size, intra)
        try:
            for _ in range(steps):
                CHECKER.launches[me].clear()
                q, k, v, dout = (ranks.cuda(part_of(x, rank=me), me) for x in p)
                leaves = [x.requires_grad_() for x in (q, k, v)]
                given: dict[str, Any] = {"k": leaves[1], "v": leaves[2]}
                if latent:
                    weight = ranks.cuda(mla[2], me)
                    made = [*(ranks.cuda(part_of(x, rank=me), me) for x in mla[:2]), weight]
                    leaves = [leaves[0], *(x.requires_grad_() for x in made)]
                    given = {"latent": Latent(made[0].squeeze(2), made[1], made[2], latent)}
                CHECKER.peak[me] = before = CHECKER.bytes[me]
                done = burst_attention(
                    leaves[0], **given, topology=topology, mask=of_mask, config=settings, return_lse=lse
                )
                out = done[0] if lse else done
                FORWARD[me] = Counter(CHECKER.launches[me]), CHECKER.peak[me] - before
                CHECKER.launches[me].clear()
                loss = (out * dout).sum() + (done[1].sum() if lse else 0.0)
                CHECKER.launches[me].clear()
                CHECKER.peak[me] = before = CHECKER.bytes[me]
                out.backward(dout) if not lse else loss.backward()
                BACKWARD[me] = Counter(CHECKER.launches[me]), CHECKER.peak[me] - before
                torch.empty(1, 32, device=out.device)  # the allocator gives memory away
                launch("optimizer", [x.grad for x in leaves], [], rank=me)
            gradients = [x.grad for x in leaves]
            return [x.detach().values for x in (out, *gradients, *([done[1]] if lse else []))]
        finally:
            topology.communicators.close()

    done = ranks.run(size, rank, world=world, bound=bound)

    def wanted() -> dict[str, Any]:
        if latent:
            names, whole = ("out", "dq", "dlatent", "drope", "dweight"), _dense_of_latents(p, mla, of_mask)
        else:
            names = "out", "dq", "dk", "dv", *(["lse"] if lse else [])
            whole = [want.out, want.dq, want.dk, want.dv, want.lse]
        pairs = {}
        for i, name in enumerate(names):
            parts = [done[r][i] for r in range(size)]
            got = sum(parts) if name == "dweight" else unshard(parts, 1, layout=settings.layout)
            pairs[name] = got, whole[i], TOLERANCE[dtype]
        return pairs

    return findings(size, done, wanted)


FORWARD: dict[int, tuple[Counter[str], int]] = {}
BACKWARD: dict[int, tuple[Counter[str], int]] = {}
"""By rank: launches of the last step of `attention`, and peak bytes above those that are there before."""


@lru_cache
def _dense(
    n: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, mask: str, lse: bool
) -> tuple[Problem, Mask, Result]:
    """Return a problem, its mask, and what one process makes of both."""
    p = problem(0, n, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    of_mask = MASKS[mask](n)
    return p, of_mask, dense(p, of_mask, dlse=torch.ones(1, n, heads) if lse else None)


def _latents(n: int, heads: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    shapes = (1, n, 1, 24), (1, n, 1, 8), (heads, 24, 8 + 16)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def _dense_of_latents(p: Problem, mla: tuple[Tensor, ...], mask: Mask) -> list[Tensor]:
    """Return out, and the gradients of Q, the latent, the rope key and the weights."""
    latent, rope, weight = (x.double().requires_grad_() for x in mla)
    whole = torch.einsum("bnxr,hrd->bnhd", latent, weight)
    k = torch.cat([whole[..., :8], rope.expand(-1, -1, len(weight), -1)], 3)
    want = dense(p._replace(k=k.detach(), v=whole[..., 8:].detach()), mask)
    torch.autograd.backward([k, whole[..., 8:]], [want.dk, want.dv])
    return [want.out, want.dq, *(x.grad for x in (latent, rope, weight) if x.grad is not None)]


def recompute(
    size: int, policy: Callable[[], Policy | None], *, again: bool, layers: int = 3, **config: Any
) -> Counter[str]:
    """Two steps of some checkpointed layers on a ring, held to those without a policy.

    again: whether backward attends anew.
    """
    width, heads, dim = 32, 2, 16
    settings = BurstConfig(kernel="triton", layout="striped", **config)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(3 * width, width, generator=generator) / width**0.5 for _ in range(layers)]
    x = torch.randn(1, TOKENS * size, width, generator=generator)

    def layer(weight: Tensor, topology: Any, y: Tensor) -> Tensor:
        q, k, v = (y @ weight.T).unflatten(-1, (3, heads, dim)).unbind(2)
        out = burst_attention(q, k, v, topology=topology, mask=Mask.causal(), config=settings)
        y = y + out.flatten(2)
        torch.empty(1, TOKENS, width, device=y.device)  # the allocator gives memory away
        return y

    def rank(me: int) -> list[Tensor]:
        topology, mine = ranks.ring(me, size), policy()
        try:
            for _ in range(2):
                leaves = [ranks.cuda(w, me).requires_grad_() for w in weights]
                y = first = ranks.cuda(shard(x, 1, rank=me, size=size, layout="striped"), me).requires_grad_()
                for weight in leaves:
                    run = partial(layer, weight, topology)
                    options = {"policy": mine, "preserve_rng_state": False}
                    y = run(y) if mine is None else checkpoint(run, y, **options)
                total = y.square().sum()
                CHECKER.launches[me].clear()
                total.backward()
                launches = CHECKER.launches[me]["triton forward"]
                if bool(launches) != again:
                    CHECKER.found("launches", f"{launches} of attention's forward in a backward")
                launch("optimizer", [leaf.grad for leaf in leaves], [], rank=me)
            return [leaf.grad.values for leaf in (first, *leaves)]
        finally:
            topology.communicators.close()

    done = ranks.run(size, rank)

    def wanted() -> dict[str, Any]:
        from burst_mcore import Topology

        want = [w.double().requires_grad_() for w in weights]
        y = first = x.double().requires_grad_()
        for weight in want:
            q, k, v = (y @ weight.T).unflatten(-1, (3, heads, dim)).unbind(2)
            y = y + burst_attention(q, k, v, topology=Topology.single(), mask=Mask.causal()).flatten(2)
        y.square().sum().backward()
        of_x = unshard([done[r][0] for r in range(size)], 1, layout="striped")
        sums = [sum(done[r][i] for r in range(size)) for i in range(1, layers + 1)]
        pairs = zip((of_x, *sums), (first, *want), strict=True)
        return {f"gradient {i}": (got, leaf.grad, 1e-4) for i, (got, leaf) in enumerate(pairs)}

    return findings(size, done, wanted)


def loss(
    size: int,
    *,
    tp: bool = False,
    cp: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    reduction: str = "mean",
    waits: int,
    sequence_parallel: bool = False,
    **options: Any,
) -> Counter[str]:
    """Two steps of the fused LM head and loss; all ranks share the vocabulary (tp) or the tokens (cp)."""
    tokens, width, vocabulary = 48, 16, 40
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype)
    weight = (torch.randn(vocabulary, width, generator=generator) / 4).to(dtype)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[::7] = -100
    factors = torch.rand(tokens, generator=generator) if reduction == "none" else None

    def mine(x: Tensor, me: int, sharded: bool) -> Any:
        return ranks.cuda(x.chunk(size)[me] if sharded else x, me)

    def rank(me: int) -> list[Tensor]:
        group = dist.new_group(list(range(size))) if tp or cp else None
        for _ in range(2):
            CHECKER.syncs[me].clear()
            h = mine(hidden, me, cp or sequence_parallel).requires_grad_()
            w, y = mine(weight, me, tp).requires_grad_(), mine(labels, me, cp)
            total = fused_linear_cross_entropy(
                h, w, y, reduction=reduction, tp_group=group if tp else None, cp_group=group if cp else None,
                sequence_parallel=sequence_parallel, chunk_tokens=16, **options,
            )  # fmt: skip
            (total.sum() if factors is None else (total * mine(factors, me, cp)).sum()).backward()
            launch("optimizer", [h.grad, w.grad], [], rank=me)
        return [h.grad.values, w.grad.values, total.detach().values]

    done = ranks.run(size, rank)

    def wanted() -> dict[str, Any]:
        h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
        total = linear_cross_entropy(h, w, labels, reduction=reduction, **options)
        (total if factors is None else (total * factors).sum()).backward()
        of_hidden = torch.cat([done[r][0] for r in range(size)]) if cp or sequence_parallel else done[0][0]
        whole = torch.cat([done[r][1] for r in range(size)]) if tp else sum(done[r][1] for r in range(size))
        losses = [done[r][2] for r in range(size)]
        return {
            "loss": (sum(losses) if cp else losses[0], total.detach(), 2e-2),
            "dhidden": (of_hidden, h.grad, 2e-2),
            "dweight": (whole if cp or tp else done[0][1], w.grad, 2e-2),
        }

    return findings(size, done, wanted, waits=waits)

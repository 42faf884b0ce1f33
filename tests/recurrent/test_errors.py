"""An error of one rank in a recurrence or convolution reaches all ranks; no call is matched with another."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from players import alone, error
from ranks import processes
from rules import RULES, N, V, learned, tensors
from torch.distributed import group, new_group
from torch.nn.functional import conv1d, pad

from burst_mcore import Layout, Topology, shard
from burst_mcore.recurrent import Shards, convolution, recurrence

RULE, CONTIGUOUS = RULES["delta rule"], Layout("contiguous")
FULL = "this rank is out of memory"


def rows(x, rank, size):
    """What contiguous shards a rank."""
    return shard(x, 1, rank=rank, size=size, layout="contiguous")


def raising(after=0):
    """A function that passes its argument on, and raises in the call behind so many."""
    calls = []

    def each(x):
        calls.append(x)
        if len(calls) > after:
            raise torch.OutOfMemoryError(FULL)
        return x

    return each


def convolve(x):
    return conv1d(pad(x, (3, 0)), torch.ones(V, 1, 4, dtype=x.dtype) / 4, groups=V)


class Backward(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError(FULL)


def batch(seed, rank, size, n=N):
    """(all tensors of a batch, this rank's shards of them)"""
    x, _ = tensors("delta rule", n, seed=seed)
    return x, tuple(rows(each, rank, size).requires_grad_() for each in x)


def step(kernel, seed, shards, cut=0):
    """Whether the outputs of a batch are right, or the error."""
    rank, size = shards.topology.rank, shards.topology.size
    x, own = batch(seed, rank, size, shards.tokens)
    try:
        out = recurrence(kernel, tuple(y[:, cut:] for y in own), shards)
    except (RuntimeError, ValueError) as problem:
        return f"{type(problem).__name__}: {problem}"
    whole, *_ = alone(lambda y: RULE.run(y, None)[0], x, x[2], shards.ends or (0, shards.tokens))
    want = rows(whole, rank, size)
    return out.shape == want.shape and (not want.numel() or error((out.detach(),), (want,)) < 1e-11)


def shards_of(size, ends=(), tokens=N):
    topology = Topology.from_group(group.WORLD, intra_size=size)
    return Shards(topology, CONTIGUOUS, tokens, ends)


def anew(size):
    """Shards of a group of their own: none of its calls goes ahead because of an earlier one."""
    return replace(shards_of(size), topology=Topology.from_group(new_group(range(size)), intra_size=size))


def of_one_rank(kind, here, shards):
    """(kernel, shards, further arguments) with the fault of a kind on the rank where it is."""
    if not here:
        return RULE, shards, {}
    first, fault = raising(), {}
    if kind == "run":
        return replace(RULE, run=lambda x, state: RULE.run(first(x), state)), shards, fault
    if kind == "decay":
        return replace(RULE, decay=lambda x: RULE.decay(first(x))), shards, fault
    if kind == "shape":
        return replace(RULE, state_shape=lambda x: RULE.state_shape(first(x))), shards, fault
    if kind == "documents":
        return RULE, replace(shards, ends=(0, 20)), fault
    return RULE, shards, {"cut": 1}


WORDS = {
    "run": f"OutOfMemoryError: {FULL}",
    "decay": f"OutOfMemoryError: {FULL}",
    "shape": f"OutOfMemoryError: {FULL}",
    "documents": "ValueError: documents must ascend from 0 to the 48 tokens of the sequence, got (0, 20)",
    "tokens": "ValueError: delta rule: layout contiguous shards rank 1 16 of 48 tokens, along dimension 1",
}


def before_the_exchange(rank, size):
    """By kind: two batches, of which rank 1, whose fragment is in the middle, refuses the first."""
    found = {}
    for kind in WORDS:
        shards = anew(size)
        kernel, own, more = of_one_rank(kind, rank == 1, shards)
        found[kind] = step(kernel, 0, own, **more), step(RULE, 1, shards), step(RULE, 2, shards)
    return found


def test_an_error_before_the_exchange_is_told_and_the_next_batch_is_right():
    for rank, found in enumerate(processes(3, before_the_exchange)):
        told = "" if rank == 1 else "OthersError: rank 1 of the ring refused this call: "
        for kind, (first, *later) in found.items():
            assert first.startswith(f"{told}{WORDS[kind]}") and later == [True, True], (rank, first, later)


def in_a_call_that_went_ahead(rank, size):
    shards = shards_of(size)
    return [step(RULE, seed, shards, cut=int(rank == 1 and seed == 1)) for seed in range(3)]


def test_no_batch_is_silently_wrong_behind_one_that_a_rank_refuses_while_others_went_ahead():
    """Then the messages of the others are under way, and no call follows."""
    for rank, (first, second, third) in enumerate(processes(3, in_a_call_that_went_ahead)):
        assert first is True and WORDS["tokens"] in second, (rank, second)
        assert "Error: " in third, (rank, third)


def behind_the_exchange(rank, size):
    """Two layers of two batches; rank 2 fails in the first layer, in the run from its state, and skips it."""
    shards, found = shards_of(size), []
    fails = replace(RULE, run=lambda x, state: RULE.run(x, raising()(state)))
    for seed, kernel in ((0, fails if rank == 2 else RULE), (1, RULE)):
        for layer in range(2):
            found.append(step(kernel, seed + 10 * layer, shards))
            if found[-1] is not True:
                break
    return found


def test_an_error_behind_the_exchange_lets_no_call_follow():
    *others, failed = processes(3, behind_the_exchange)
    for first, *later in others:
        assert first is True and later
        assert all("rank 2 of the ring " in x and FULL in x for x in later), later
    assert failed[0] == f"OutOfMemoryError: {FULL}" and "make the process group anew" in failed[1], failed


def convolved(x, shards, here, convolve=convolve):
    try:
        return convolution(convolve, x[:, here:].mT, 4, shards, -1).mT
    except (RuntimeError, ValueError) as problem:
        return f"{type(problem).__name__}: {problem}"


def convolutions(rank, size):
    """Rank 1 refuses the first, and fails behind the exchange of the third."""
    shards, here = shards_of(size), int(rank == 1)
    x = torch.randn(2, N, V, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want, own = convolve(x.mT).mT, partial(rows, rank=rank, size=size)
    first, second = convolved(own(x), shards, here), convolved(own(x), shards, 0)
    third = convolved(own(x), shards, 0, raising() if rank == 1 else convolve)
    torch.distributed.barrier()
    return first, error((second,), (own(want),)) < 1e-11, third, convolved(own(x), shards, 0)


def test_errors_of_one_rank_in_a_convolution_are_told_too():
    words = "ValueError: convolution: layout contiguous shards rank 1 16 of 48 tokens"
    for rank, (first, second, third, last) in enumerate(processes(3, convolutions)):
        told = "" if rank == 1 else "OthersError: rank 1 of the ring refused this call: "
        assert first.startswith(told + words) and second, (rank, first)
        assert isinstance(third, str) == (rank == 1) and f"OutOfMemoryError: {FULL}" in last, (
            rank,
            third,
            last,
        )


SECOND = "RuntimeError: recurrences and convolutions over shards have no second derivative"
IN_BACKWARD = {"kernel": f"OutOfMemoryError: {FULL}", "create_graph": SECOND, "halo": SECOND}


def in_backward(rank, size):
    """By kind: rank 1's run of the middle raises in backward; or rank 1 alone wants second derivatives."""
    shards, found = shards_of(size), {}
    for kind in IN_BACKWARD:
        fails = kind == "kernel" and rank == 1

        def run(x, state, fails=fails):
            out, final = RULE.run(x, state)
            return Backward.apply(out) if fails else out, final

        _, own = batch(0, rank, size)
        if kind == "halo":
            own = own[2:3]
            out = convolution(convolve, own[0][:, :, 0].mT, 4, shards, -1)
        else:
            out = recurrence(replace(RULE, run=run), own, shards)
        with pytest.raises((RuntimeError, ValueError)) as caught:
            torch.autograd.grad(out.sum(), own, create_graph=kind != "kernel" and rank == 1)
        found[kind] = f"{caught.type.__name__}: {caught.value}", step(RULE, 1, shards)
    return found


def test_an_error_in_backward_before_its_exchange_is_told_and_the_next_batch_is_right():
    for rank, found in enumerate(processes(3, in_backward)):
        told = "" if rank == 1 else "OthersError: rank 1 of the ring refused this call: "
        assert found == {kind: (told + words, True) for kind, words in IN_BACKWARD.items()}, rank


NO_GRADIENT = "gradient wanted: True on ranks [0, 2], False on ranks [1]"
DIFFERING = {
    "no_grad": NO_GRADIENT,
    "no_grad, convolution": NO_GRADIENT,
    "documents": "documents: ",
    "a parameter that is not named": "gradient wanted: True on ranks [0], False on ranks [1, 2]",
}
"""What a rank does otherwise, and what all are told."""


def differing(rank, size):
    """By kind: what this rank is told, and whether its next batch is right."""
    found = {}
    _, own = batch(0, rank, size)
    mamba, x, _ = learned("Mamba 2")
    of_mamba = tuple(rows(each, rank, size).detach() for each in x)
    calls = (
        lambda shards: recurrence(RULE, own, shards),
        lambda shards: convolution(convolve, own[2][:, :, 0].mT, 4, shards, -1),
        lambda shards: recurrence(RULE, own, replace(shards, ends=(0, 20 + (rank == 1), N))),
        lambda shards: recurrence(replace(mamba, parameters=()), of_mamba, shards),
    )
    for kind, call in zip(DIFFERING, calls, strict=True):
        gradients, shards = rank != 1 or "no_grad" not in kind, anew(size)
        with torch.set_grad_enabled(gradients), pytest.raises(ValueError) as caught:
            call(shards)
        found[kind] = str(caught.value), step(RULE, 1, shards)
    return found


def test_ranks_that_differ_are_told_before_the_exchange():
    for found in processes(3, differing):
        for kind, (words, later) in found.items():
            assert DIFFERING[kind] in words and later is True, (kind, words)


def gradients_without_tokens(rank, size):
    """Which gradients a rank has of its tensors and of a parameter, where rank 3 has no token."""
    found = []
    for ends in ((0, 3), (0, 1, 2, 3)):
        shards, scale = shards_of(size, ends, 3), torch.ones(1, dtype=torch.float64, requires_grad=True)
        x, _ = tensors("delta rule", 3)
        own = tuple(rows(each, rank, size).requires_grad_() for each in x)
        run = lambda x, state, scale=scale: RULE.run((x[0] * scale, *x[1:]), state)  # noqa: E731
        recurrence(replace(RULE, run=run, parameters=(scale,)), own, shards).sum().backward()
        found += [each.grad is not None for each in (*own, scale)]
    return found


def test_a_rank_without_tokens_has_gradients_of_all_its_tensors_and_parameters():
    """Of zero, and not None: exchanges of gradients, and exchanges before this one, await them."""
    assert processes(4, gradients_without_tokens) == [[True] * 2 * 6] * 4

"""Log-probabilities and entropies of tokens without logits, and a policy gradient made of them."""

import pytest
import torch
from causal_lms import dataset, model_of
from live import LiveBytes
from loops import assert_alike, gradients_of, mesh_of, refuses, tensor_parallel
from ranks import on_ranks, processes
from torch.distributed.fsdp import fully_shard

from burst_mcore.torch import parallelize, token_statistics

TOKENS = 37


def _plain(logits, labels, temperature, softcap=None):
    """(log-probability of the label, entropy) of each token, by all logits."""
    capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_p = (capped / temperature[..., None]).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    chosen = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return chosen.where(labels >= 0, 0.0), entropy.where(labels >= 0, 0.0)


def _head(dtype=torch.float64, vocabulary=23):
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(2, 9, 6, dtype=dtype, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, 6, dtype=dtype, generator=generator).requires_grad_()
    bias = torch.randn(vocabulary, dtype=dtype, generator=generator).requires_grad_()
    labels = torch.randint(0, vocabulary, (2, 9), generator=generator)
    labels[0, :4] = -100
    temperature = torch.rand(2, 9, dtype=dtype, generator=generator) + 0.5
    upstream = torch.randn(2, 2, 9, dtype=dtype, generator=generator)
    return (hidden, weight, bias), labels, temperature, upstream


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_statistics_and_their_gradients(softcap):
    leaves, labels, temperature, upstream = _head()
    hidden, weight, bias = leaves
    for each in (temperature, torch.full_like(temperature, 0.6)):
        want = torch.stack(_plain(hidden @ weight.T + bias, labels, each, softcap))
        asked = float(each[0, 0]) if each is not temperature else each
        found = torch.stack(
            token_statistics(hidden, weight, labels, asked, bias=bias, softcap=softcap, chunk_tokens=4)
        )
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
        wanted = torch.autograd.grad(want, leaves, upstream)
        for mine, theirs in zip(torch.autograd.grad(found, leaves, upstream), wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


def test_peak_memory_is_that_of_a_chunk():
    """Both passes hold the gradients and logits of a few chunks, whatever the number of tokens is."""
    width, vocabulary, chunk = 16, 512, 8
    peaks = []
    for tokens in (64, 512):
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
        weight = torch.randn(vocabulary, width, generator=generator).requires_grad_()
        labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
        with LiveBytes() as live:
            found = token_statistics(hidden, weight, labels, chunk_tokens=chunk)
            torch.stack(found).sum().backward()
        peaks.append(live.peak - hidden.nbytes - weight.nbytes)  # without the gradients, which stay
    a_chunk, a_token = 4 * chunk * vocabulary, 4 * 2 * width + 64
    assert peaks[1] < 5 * a_chunk + 512 * a_token, peaks
    assert peaks[1] - peaks[0] < (512 - 64) * a_token, peaks  # logits are 2048 bytes a token


def test_temperatures():
    """Those of ignored labels are not read."""
    (hidden, weight, _), labels, *_ = _head()
    for temperature in (0.0, float("nan"), torch.ones(3)):
        with pytest.raises(ValueError, match="temperature must be"):
            token_statistics(hidden, weight, labels, temperature)
    temperature = torch.tensor([0.0, 2.0, float("nan")] * 3).expand(2, 9)
    legal = temperature > 0
    kept = torch.where(legal, labels, -100)
    want = token_statistics(hidden, weight, kept, temperature.where(legal, 1.0))
    torch.testing.assert_close(token_statistics(hidden, weight, kept, temperature), want, rtol=0, atol=0)
    with pytest.raises(ValueError, match="temperature must be finite and above 0, got nan"):
        token_statistics(hidden, weight, labels, temperature)


@on_ranks(2)
def test_temperatures_are_those_of_all_ranks(rank, size):
    (hidden, weight, _), labels, temperature, _ = _head()
    rows, group = weight.detach()[rank * 12 :][:12], torch.distributed.group.WORLD
    different = "ranks make different calls: checksums of labels, and of weights or temperatures: "
    for mine, words in (
        (-1.0 if rank else 1.0, "rank 1: temperature must be finite and above 0, got -1.0"),
        ("cold" if rank else 1.0, "rank 1: temperature must be a number, or one for each label, got 'cold'"),
        (1.0 + rank, different),
        (temperature + rank, different),
    ):
        own = words.removeprefix(f"rank {rank}: ")  # as the rank that refuses says
        with pytest.raises(ValueError, match=f"^{own}"):
            token_statistics(hidden, rows, labels, mine, tp_group=group)


@pytest.mark.parametrize("late", [False, True])
@on_ranks(4)
def test_neighbours_of_tensor_parallelism_do_not_wait_for_a_rank_that_refuses(rank, size, late):
    """late: the model is sharded over TP once it is parallelized."""
    ids, labels, *_ = _batch()
    mesh, model = mesh_of(size, "cp", "tp"), model_of()
    if not late:
        tensor_parallel(model, mesh["tp"])
    cp = parallelize(model, mesh["cp"])
    if late:
        tensor_parallel(model, mesh["tp"])
    fully_shard(model, mesh=mesh["cp"])
    batch = cp.shard({"input_ids": ids, "labels": labels})
    odd = {"input_ids": ids.float() if rank == 1 else ids}
    loaded = iter(cp.loader([{"input_ids": ids}, odd]))
    next(loaded)
    other, of_rank_1 = "another rank", ("another rank", "batch", "another rank", "another rank")
    refuses(
        (
            (other, other, "temperature", other),
            lambda: cp.token_stats(model, batch, -1.0 if rank == 2 else 1.0),
        ),
        (of_rank_1, lambda: cp.shard(odd)),
        (of_rank_1, lambda: next(loaded)),
    )


def _over_a_vocabulary(rank, size, leaves, labels, temperature, upstream):
    hidden, weight, bias = (x.detach() for x in leaves)
    rows = -(-len(weight) // size)
    mine = [hidden.requires_grad_(), *(x[rank * rows :][:rows].requires_grad_() for x in (weight, bias))]
    how = {"bias": mine[2], "tp_group": torch.distributed.group.WORLD}
    found = torch.stack(token_statistics(*mine[:2], labels, temperature, **how))
    want = torch.stack(_plain(leaves[0] @ leaves[1].T + leaves[2], labels, temperature))
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    of_hidden, *others = torch.autograd.grad(want, leaves, upstream)
    theirs = [of_hidden, *(x[rank * rows :][:rows] for x in others)]
    for ours, true in zip(torch.autograd.grad(found, mine, upstream), theirs, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("ranks", [2, 4])  # of 4 ranks and 9 rows, the last has none
def test_a_vocabulary_over_ranks(ranks):
    leaves, *others = _head(vocabulary=9 if ranks == 4 else 23)
    processes(ranks, _over_a_vocabulary, leaves, *others)


def _batch():
    ids = torch.stack([sample["input_ids"] for sample in dataset(2, tokens=TOKENS)])
    generator = torch.Generator().manual_seed(2)
    labels = ids.clone()
    labels[:, :9] = -100  # the prompt
    old = torch.randn(2, TOKENS, generator=generator) * 0.1
    advantages = torch.tensor([[0.7], [-0.4]]).expand(-1, TOKENS)
    temperature = torch.rand(2, TOKENS, generator=generator) + 0.5
    return ids, labels, old, advantages, temperature


def _policy_loss(log_p, entropy, old, advantages, real):
    """GRPO's: a clipped ratio, and a bonus of entropy."""
    ratio = (log_p - log_p.detach() + old).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages)
    return -((gain + 0.05 * entropy) * real).sum() / real.sum()


def _policy_of_one(kind):
    ids, labels, old, advantages, temperature = _batch()
    model = model_of(**kind)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    logits = model(input_ids=ids, use_cache=False).logits
    log_p, entropy = _plain(logits, shifted, temperature)
    loss = _policy_loss(log_p, entropy, old, advantages, shifted >= 0)
    loss.backward()
    return loss.item(), gradients_of(model)


def _policy(rank, size, names, kind, whole):
    ids, labels, old, advantages, temperature = _batch()
    mesh, model = mesh_of(size, *names), model_of(**kind)
    if "tp" in names:
        tensor_parallel(model, mesh["tp"])
    cp = parallelize(model, mesh["cp"])
    fully_shard(model, mesh=mesh["cp"])
    own = {"old": old, "advantages": advantages, "temperature": temperature}  # padded as the tokens are
    batch = cp.shard({"input_ids": ids, "labels": labels, **own})
    mine = {name: batch.pop(name) for name in own}
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    log_p, entropy = cp.token_stats(model, batch, mine.pop("temperature"))
    if whole:  # every rank makes the loss of all tokens
        log_p, entropy = cp.gather(log_p, TOKENS), cp.gather(entropy, TOKENS)
        loss = _policy_loss(log_p, entropy, old, advantages, shifted >= 0)
    else:  # each of its own, which are summed
        real = batch["shift_labels"] >= 0
        loss = cp.whole_loss(_policy_loss(log_p, entropy, **mine, real=real) * real.sum(), real.sum())
    loss.backward()
    return loss.item(), gradients_of(model)


@pytest.mark.parametrize(
    ("names", "kind", "whole"),
    [
        (("cp",), {"final_logit_softcapping": 5.0, "kind": "Gemma2", "sliding_window": 8}, True),
        (("cp", "tp"), {}, False),
        pytest.param(("cp",), {}, False, marks=pytest.mark.slow),
        pytest.param(("tp", "cp"), {}, True, marks=pytest.mark.slow),
    ],
)
def test_a_policy_gradient(names, kind, whole):
    found = processes(2 ** len(names), _policy, names, kind, whole)
    assert_alike(found, _policy_of_one(kind), 1e-5, 2e-6)

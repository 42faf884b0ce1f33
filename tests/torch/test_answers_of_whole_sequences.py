"""Outputs that are not the loss: chosen logits, hidden states, tuples, caches; of one process, or refused."""

import pytest
import torch
from causal_lms import dataset, model_of
from loops import mesh_of, refuses
from ranks import on_ranks, processes
from transformers import DynamicCache, StaticCache

from burst_mcore.torch import parallelize
from burst_mcore.transformers.models.strategies import WholeBatch
from burst_mcore.transformers.prepare import sequence_of
from burst_mcore.wrap import while_set

KEPT = [6, 1, 100, torch.tensor([3, 40, 5, 3]), torch.tensor([0]), torch.tensor([-1, 2])]
KEPT.append(torch.arange(41) % 3 == 1)
"""Of 41 tokens: the last, more than there are, in any order, twice, on one rank alone, by a mask."""


def _ids(rows=2, tokens=41):
    return torch.stack([sample["input_ids"] for sample in dataset(rows, tokens=tokens)])


def _prepared(size, layout="striped", loss="model", **options):
    model = model_of(**options)
    return model, parallelize(model, mesh_of(size), loss=loss, reduction="sum", config={"layout": layout})


def _answers(model):
    """Outputs of whole batches, and the gradient of a loss that is made of them."""
    found = [model(input_ids=_ids(), logits_to_keep=keep).logits for keep in KEPT]
    out = model(input_ids=_ids(), logits_to_keep=torch.tensor([7, 33]), output_hidden_states=True)
    loss = (out.logits[:, 1] * out.logits[:, 0]).mean() + out.hidden_states[1][:, ::3].pow(2).mean()
    loss.backward()
    as_tuple = model(input_ids=_ids(), return_dict=False, use_cache=False)
    assert type(as_tuple) is tuple and len(as_tuple) == 1
    gradient = {name: p.grad for name, p in model.named_parameters()}
    return [x.detach() for x in (*found, out.logits, *out.hidden_states, *as_tuple)], gradient


def _of_whole_batches(rank, size, layout, loss):
    model, _ = _prepared(size, layout, loss)
    with while_set(sequence_of(model), batches=WholeBatch(sequence_of(model))):
        found, gradient = _answers(model)
        labelled = {"input_ids": _ids(), "labels": _ids()}
        last = "logits_to_keep: it must be a number of last tokens"

        def kept(keep, **columns):
            return lambda: model(input_ids=_ids(), logits_to_keep=keep, **columns)

        refuses(
            ("logits_to_keep: a loss is of all tokens", kept(6, labels=_ids())),
            (f"{last}, or indices [chosen] of 41 tokens", kept(torch.tensor([41]))),
            (last, kept(torch.tensor([[1], [2]]))),
            ("batch: ranks of a CP group were given different", kept(6 + rank)),
            ("cache: a shard has none", lambda: model(input_ids=_ids(), use_cache=True)),
        )
        hidden = model(**labelled, output_hidden_states=True).hidden_states[-1].shape
    for x in gradient.values():
        torch.distributed.all_reduce(x)
    return found, gradient, hidden


@pytest.mark.parametrize(
    ("layout", "loss"),
    [("striped", "model"), ("zigzag", "fused"), pytest.param("contiguous", "fused", marks=pytest.mark.slow)],
)
def test_whole_batches(layout, loss):
    want, gradients = _answers(model_of())
    for found, gradient, hidden in processes(2, _of_whole_batches, layout, loss):
        for mine, theirs in zip(found, want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        for name, theirs in gradients.items():
            torch.testing.assert_close(gradient[name], theirs, rtol=1e-4, atol=1e-5)
        assert hidden == (2, 41, 24)


@on_ranks(2)
def test_shards(rank, size):
    model, cp = _prepared(size, loss="fused")
    batch = cp.shard({"input_ids": _ids()})
    unlabelled = {name: x for name, x in batch.items() if name != "shift_labels"}
    out = model(**unlabelled, output_hidden_states=True, return_dict=True)
    assert out.logits.shape[1] == batch["input_ids"].shape[1] and getattr(out, "cache", None) is None
    loss, *_ = model(**batch, return_dict=False)
    assert torch.equal(loss, model(**batch).loss)
    experts, _ = _prepared(size, kind="Mixtral", num_local_experts=2)
    chosen = torch.tensor([3, 5])
    refuses(
        ("logits_to_keep: it would choose", lambda: model(**unlabelled, logits_to_keep=6)),
        ("logits_to_keep", lambda: model(**batch, logits_to_keep=chosen)),
        ("cache: a shard has none to return", lambda: model(**unlabelled, use_cache=True)),
        ("output_attentions", lambda: model(**unlabelled, output_attentions=True)),
        (
            (
                "another rank: rank 1 of the ring refused this call: UnsupportedError: "
                "unsupported (logits_to_keep)",
                "logits_to_keep",
            ),
            lambda: model(**unlabelled, logits_to_keep=rank),
        ),
        ("auxiliary loss", lambda: experts(**unlabelled, output_router_logits=True)),
    )


GREEDY = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}


def _drafted(model):
    """Tokens that are said with an assistant model and by prompt lookup; outputs of prompts with a cache."""
    model.eval()
    assistant = model_of(num_hidden_layers=1).eval()
    few = model_of(num_hidden_layers=1).eval()
    few.generation_config.num_assistant_tokens = 1
    few.generation_config.num_assistant_tokens_schedule = "constant"
    repeated = torch.arange(3, 14).repeat(1, 3)  # whose next tokens are looked up in it
    said = [
        model.generate(_ids(1, 23), assistant_model=assistant, **GREEDY),
        model.generate(_ids(1, 23), assistant_model=few, **GREEDY),
        model.generate(repeated, prompt_lookup_num_tokens=3, **GREEDY),
        model.generate(_ids(1, 23), **GREEDY),
    ]
    told = {"return_dict_in_generate": True, "output_hidden_states": True}
    out = model.generate(_ids(2, 23), **GREEDY, **told)
    name = "cache" if "cache" in model.forward.__code__.co_varnames else "past_key_values"
    every = model(input_ids=_ids(2, 23), **{name: DynamicCache()}).logits
    some = model(
        input_ids=_ids(2, 23), **{name: DynamicCache()}, logits_to_keep=torch.tensor([4, 22, 1])
    ).logits
    return *said, every, some, *out.hidden_states[0]


@on_ranks(2)
def test_generate_with_drafts(rank, size):
    model, _ = _prepared(size, "zigzag", "model")
    with torch.no_grad():
        for found, want in zip(_drafted(model), _drafted(model_of()), strict=True):
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    static = {"input_ids": _ids(1, 23), "past_key_values": StaticCache(config=model.config, max_cache_len=40)}

    def generated(**options):
        return lambda: model.generate(_ids(1, 23), **GREEDY, **options)

    refuses(
        ("attention outside of an engine: static caches, which", generated(cache_implementation="static")),
        ("cache: static caches are unsupported", lambda: model(**static)),
        ("logits_to_keep: generate sets it, and needs use_cache", generated(use_cache=False)),
    )

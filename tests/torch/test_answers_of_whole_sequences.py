"""Outputs that are not the loss: chosen logits, hidden states, tuples, caches; of one process, or refused."""

import logging

import pytest
import torch
from causal_lms import dataset, model_of
from ranks import processes
from torch.distributed.device_mesh import init_device_mesh
from transformers import DynamicCache, StaticCache

from burst_mcore.torch import parallelize
from burst_mcore.transformers.errors import RefusedError
from burst_mcore.transformers.models.strategies import WholeBatch
from burst_mcore.transformers.prepare import sequence_of
from burst_mcore.wrap import while_set

KEPT = [
    6,
    1,
    100,
    torch.tensor([3, 40, 5, 3]),
    torch.tensor([0]),
    torch.tensor([-1, 2]),
    torch.arange(41) % 3 == 1,
]
"""Of 41 tokens: the last, more than there are, in any order, twice, on one rank alone, by a mask."""


def _ids(rows=2, tokens=41):
    return torch.stack([sample["input_ids"] for sample in dataset(rows, tokens=tokens)])


def _prepared(size, layout="striped", loss="model", **options):
    logging.getLogger("burst_mcore").setLevel("ERROR")
    model = model_of(**options)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    return model, parallelize(model, mesh, loss=loss, reduction="sum", config={"layout": layout})


def _refused(do):
    with pytest.raises(RefusedError) as caught:
        do()
    return str(caught.value)


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
        said = [
            _refused(lambda: model(**labelled, logits_to_keep=6)),
            _refused(lambda: model(input_ids=_ids(), logits_to_keep=torch.tensor([41]))),
            _refused(lambda: model(input_ids=_ids(), logits_to_keep=torch.tensor([[1], [2]]))),
            _refused(lambda: model(input_ids=_ids(), logits_to_keep=6 + rank)),
            _refused(lambda: model(input_ids=_ids(), use_cache=True)),
        ]
        hidden = model(**labelled, output_hidden_states=True).hidden_states[-1].shape
    for x in gradient.values():
        torch.distributed.all_reduce(x)
    return found, gradient, said, hidden


@pytest.mark.parametrize(
    ("layout", "loss"),
    [("striped", "model"), ("zigzag", "fused"), pytest.param("contiguous", "fused", marks=pytest.mark.slow)],
)
def test_whole_batches(layout, loss):
    want, gradients = _answers(model_of())
    for found, gradient, said, hidden in processes(2, _of_whole_batches, layout, loss):
        for mine, theirs in zip(found, want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        for name, theirs in gradients.items():
            torch.testing.assert_close(gradient[name], theirs, rtol=1e-4, atol=1e-5)
        assert hidden == (2, 41, 24)
        starts = [
            "refused (logits_to_keep): a loss is of all tokens",
            "refused (logits_to_keep): it must be a number of last tokens, or indices [chosen] of 41 tokens",
            "refused (logits_to_keep): it must be a number of last tokens",
            "refused (batch): ranks of a CP group were given different whole batches",
            "refused (cache): a shard has none",
        ]
        for text, start in zip(said, starts, strict=True):
            assert text.startswith(start), text


def _of_shards(rank, size):
    model, cp = _prepared(size, loss="fused")
    batch = cp.shard({"input_ids": _ids()})
    unlabelled = {name: x for name, x in batch.items() if name != "shift_labels"}
    out = model(**unlabelled, output_hidden_states=True, return_dict=True)
    assert out.logits.shape[1] == batch["input_ids"].shape[1] and getattr(out, "cache", None) is None
    loss, *_ = model(**batch, return_dict=False)
    assert torch.equal(loss, model(**batch).loss)
    said = [
        _refused(lambda: model(**unlabelled, logits_to_keep=6)),
        _refused(lambda: model(**batch, logits_to_keep=torch.tensor([3, 5]))),
        _refused(lambda: model(**unlabelled, use_cache=True)),
        _refused(lambda: model(**unlabelled, output_attentions=True)),
        _refused(lambda: model(**unlabelled, logits_to_keep=rank)),
    ]
    experts, cp = _prepared(size, kind="Mixtral", num_local_experts=2)
    said += [_refused(lambda: experts(**unlabelled, output_router_logits=True))]
    return said


def test_shards():
    want = [
        "refused (logits_to_keep): it would choose tokens in every shard: leave it out",
        "refused (logits_to_keep)",
        "refused (cache): a shard has none to return",
        "refused (output_attentions)",
        ("refused (another rank): ranks [1]", "refused (logits_to_keep)"),
        "refused (auxiliary loss)",
    ]
    for rank, said in enumerate(processes(2, _of_shards)):
        for text, start in zip(said, want, strict=True):
            assert text.startswith(start if isinstance(start, str) else start[rank]), text


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
    return said, [every, some, *out.hidden_states[0]]


def _generated(rank, size):
    model, _ = _prepared(size, "zigzag", "model")
    with torch.no_grad():
        found = _drafted(model)
    static = StaticCache(config=model.config, max_cache_len=40)
    words = [
        _refused(lambda: model.generate(_ids(1, 23), cache_implementation="static", **GREEDY)),
        _refused(lambda: model(input_ids=_ids(1, 23), past_key_values=static)),
        _refused(lambda: model.generate(_ids(1, 23), use_cache=False, **GREEDY)),
    ]
    return *found, words


def test_generate_with_drafts():
    with torch.no_grad():
        want, outputs = _drafted(model_of())
    for said, found, words in processes(2, _generated):
        for mine, theirs in zip(said, want, strict=True):
            assert torch.equal(mine, theirs)
        for mine, theirs in zip(found, outputs, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        assert "static caches, which are unsupported: use the default dynamic cache" in words[0]
        assert words[1].startswith("refused (cache): static caches are unsupported")
        assert "generate sets it, and needs use_cache" in words[2]

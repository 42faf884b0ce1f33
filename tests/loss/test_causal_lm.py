"""patch_causal_lm: models of transformers, small and with random weights, against themselves unpatched."""

import copy
import inspect
import pickle

import pytest
import torch
from ranks import processes

from burst_mcore.loss import patch_causal_lm, unpatch_causal_lm

transformers = pytest.importorskip("transformers")

WIDTH, VOCABULARY = 32, 97
COMMON = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CAPPED = {"head_dim": 8, "final_logit_softcapping": 0.3, "query_pre_attn_scalar": 8}
GPT = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
EXPERTS = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1}
MODELS = {  # config, its options, and what is special about the head
    "Llama": ("Llama", COMMON),
    "Qwen2": ("Qwen2", {**COMMON, "tie_word_embeddings": True}),
    "Gemma2": ("Gemma2", {**COMMON, **CAPPED}),  # tied, and capped
    "Gemma3": ("Gemma3Text", {**COMMON, **CAPPED}),
    "RecurrentGemma": ("RecurrentGemma", {**COMMON, "logits_soft_cap": 0.3, "num_hidden_layers": 3}),
    "Cohere": ("Cohere", {**COMMON, "logit_scale": 0.3}),
    "Granite": ("Granite", {**COMMON, "logits_scaling": 3.0}),
    "GPT2": ("GPT2", {**GPT, "n_positions": 64}),
    "GPTNeoX": ("GPTNeoX", COMMON),
    "GPTJ": ("GPTJ", {**GPT, "n_positions": 64, "rotary_dim": 8}),  # its head has a bias
    "Phi": ("Phi", {**COMMON, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),  # too
    "OPT": ("OPT", {**COMMON, "ffn_dim": 48, "word_embed_proj_dim": WIDTH, "dropout": 0.0}),
    "Mixtral": ("Mixtral", {**COMMON, **EXPERTS}),
    "Mamba": ("Mamba", {"hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 8}),  # logits.float()
    "Bart": ("Bart", {"d_model": WIDTH, "decoder_layers": 2, "decoder_ffn_dim": 48, "dropout": 0.0}),
}


def build(name, vocabulary=VOCABULARY, **options):
    """A model in which gradients are large enough to compare: its head's weights are not near 0."""
    kind, defaults = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**defaults, "vocab_size": vocabulary, **options})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    head = model.get_output_embeddings()
    torch.nn.init.normal_(head.weight, std=0.3)
    if head.bias is not None:
        torch.nn.init.normal_(head.bias)
    return model.train()


def batch(tokens=11, vocabulary=VOCABULARY, seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (2, tokens), generator=generator)
    labels = ids.clone()
    labels[0, :4] = labels[1, 6] = -100
    return {"input_ids": ids, "labels": labels}


def shifted(given):
    labels = torch.nn.functional.pad(given["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    return {"input_ids": given["input_ids"], "shift_labels": labels}


def run(model, given):
    """(output, gradients by name): backward is that of twice the loss."""
    model.zero_grad()
    out = model(**given)
    (2 * out["loss"]).backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_alike(model, plain, given, expected=None, rtol=1e-5, atol=1e-6):
    """`expected` is what the unpatched model is given, where it needs something else."""
    want, gradients = run(plain, expected or given)
    out, found = run(model, given)
    assert out.logits is None
    assert want.logits is not None
    torch.testing.assert_close(out.loss, want.loss, rtol=rtol, atol=atol)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, rtol=rtol, atol=atol * max(1.0, scale))


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_the_models_own(name):
    plain = build(name)
    model = patch_causal_lm(copy.deepcopy(plain), chunk_tokens=5)
    given = batch()
    assert_alike(model, plain, given)
    if name == "Bart":  # it shifts nothing, and takes no more
        return
    if name == "Mixtral":
        assert model(**given).aux_loss > 0
    assert_alike(model, plain, {**given, "num_items_in_batch": 7})
    assert_alike(model, plain, {**given, "num_items_in_batch": torch.tensor(7)})
    both = {**shifted(given), "labels": given["labels"]}
    assert_alike(model, plain, shifted(given), expected=both)
    assert_alike(model, plain, both)


def test_tuples_lack_logits():
    plain = build("Llama", use_cache=False)
    model = patch_causal_lm(copy.deepcopy(plain))
    want, found = (m(**batch(), return_dict=False) for m in (plain, model))
    assert len(found) == len(want) - 1 == 1
    torch.testing.assert_close(found[0], want[0])


def test_labels_by_position():
    plain = build("Llama")
    model = patch_causal_lm(copy.deepcopy(plain))
    at = [*inspect.signature(model.forward).parameters].index("labels")
    given = batch()
    arguments = [given["input_ids"], *[None] * (at - 1)]
    out = model(*arguments, given["labels"])
    assert out.logits is None
    torch.testing.assert_close(out.loss, plain(**given).loss)
    shift = shifted(given)["shift_labels"]
    torch.testing.assert_close(model(*arguments, None, shift_labels=shift).loss, out.loss)


@pytest.mark.parametrize("frozen", ["head", "body"])
@pytest.mark.parametrize("name", ["Llama", "Phi"])
def test_frozen(name, frozen):
    plain = build(name)
    head = plain.get_output_embeddings()
    for parameter in plain.parameters():
        parameter.requires_grad_(any(parameter is p for p in head.parameters()) == (frozen == "body"))
    assert_alike(patch_causal_lm(copy.deepcopy(plain)), plain, batch())


def test_compiled():
    plain = build("Llama", use_cache=False)
    model = patch_causal_lm(copy.deepcopy(plain))
    compiled = torch.compile(model, backend="eager")
    want, found = plain(**batch()), compiled(**batch())
    assert found.logits is None
    torch.testing.assert_close(found.loss, want.loss)


def test_without_labels_nothing_changes():
    plain = build("Gemma2").eval()
    model = patch_causal_lm(copy.deepcopy(plain))
    ids = batch()["input_ids"]
    assert torch.equal(model(ids).logits, plain(ids).logits)
    assert torch.equal(model(ids, logits_to_keep=1).logits, plain(ids, logits_to_keep=1).logits)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    with torch.no_grad():
        torch.testing.assert_close(model(**batch()).loss, plain(**batch()).loss)


def test_logits_to_keep_keeps_so_many_labels():
    plain = build("Llama")
    model = patch_causal_lm(copy.deepcopy(plain))
    given = shifted(batch())
    kept = {**given, "shift_labels": given["shift_labels"][:, -5:].contiguous(), "logits_to_keep": 5}
    assert_alike(model, plain, kept, expected={**kept, "labels": kept["shift_labels"]})
    with pytest.raises(ValueError, match="labels must have the shape"):
        model(**batch(), logits_to_keep=5)


def test_patched_once_and_taken_back():
    model = build("Qwen2")
    names, before = dir(model), dict(model.__dict__)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    kind, loss_function, signature = type(model), model.loss_function, inspect.signature(model.forward)
    assert unpatch_causal_lm(model) is model  # not patched: stays
    assert patch_causal_lm(model) is model
    forward = model.forward
    assert patch_causal_lm(model, chunk_tokens=3) is model
    assert model.forward is forward
    assert forward.options["chunk_tokens"] == 3
    assert inspect.signature(model.forward) == signature
    assert type(model) is kind
    assert model.loss_function is loss_function
    run(model, batch())
    assert model.state_dict().keys() == state.keys()
    assert unpatch_causal_lm(model) is model
    assert model.__dict__.keys() == before.keys()
    assert dir(model) == names
    assert model(**batch()).logits is not None
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())


def test_copies_are_patched_too():
    model = patch_causal_lm(build("Llama"), chunk_tokens=5)
    want = model(**batch()).loss
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            model.lm_head.weight.mul_(1.01)  # it must not be this one's
        out = other(**batch())
        assert out.logits is None
        assert torch.equal(out.loss, want)
        unpatch_causal_lm(other)
        assert other(**batch()).logits is not None
        assert model(**batch()).logits is None
        with torch.no_grad():
            model.lm_head.weight.copy_(other.lm_head.weight)
    fresh = build("Llama")
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh(**batch()).loss, want)


def test_models_that_cannot_be_patched():
    small = {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "vocab_size": 97,
        "max_position_embeddings": 64,
    }
    bart = transformers.BartForConditionalGeneration(transformers.BartConfig(**small))
    llama = build("Llama")
    for model, words in (
        (bart, "BartForConditionalGeneration is an encoder and a decoder"),
        (llama.model, "LlamaModel has no output embeddings"),
        (torch.nn.Linear(2, 2), "Linear has no output embeddings"),
    ):
        with pytest.raises(ValueError, match=words):
            patch_causal_lm(model)
    llama.config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="LlamaForCausalLM is an encoder and a decoder"):
        patch_causal_lm(llama)
    llama.config.is_encoder_decoder = False
    llama.lm_head.forward = llama.lm_head.forward
    with pytest.raises(ValueError, match="has been replaced"):
        patch_causal_lm(llama)
    llama.lm_head = torch.nn.Embedding(2, 2)
    with pytest.raises(
        ValueError,
        match="LlamaForCausalLM must be a torch.nn.Linear, got a torch.nn.modules.sparse.Embedding",
    ):
        patch_causal_lm(llama)
    llama.lm_head = None
    with pytest.raises(ValueError, match="LlamaForCausalLM has no output embeddings"):
        patch_causal_lm(llama)


class OddForCausalLM(torch.nn.Module):
    """A causal LM whose loss is `asked` of its logits."""

    def __init__(self, asked):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.asked = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7), asked

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.head(self.embed(input_ids))
        return {"loss": None if labels is None else self.asked(logits, labels), "logits": logits}


def entropy(z, y, **options):
    return torch.nn.functional.cross_entropy(z.view(-1, 7), y.reshape(-1), **options)


ODD = {
    "shifted": lambda z, y: entropy(z[:, :-1].contiguous(), y[:, 1:]),
    "all of the vocabulary": lambda z, y: entropy(z[..., :9][:, :, 0:7], y),
    "shifted by dots": lambda z, y: entropy(z[..., :-1, :].reshape(-1, z.size(-1)), y[..., 1:]),
    "smoothed": lambda z, y: entropy(z.float(), y, label_smoothing=0.1, reduction="sum"),
    "of each token": lambda z, y: entropy(z, y, reduction="none")[1:].square().mean(),
    "a tensor's scale": lambda z, y: entropy(torch.tensor(0.5) * z / 2, y),
    "in place": lambda z, y: entropy(z.to(torch.float32).contiguous(), y).add_(1),
    "capped": lambda z, y: entropy(3 * torch.tanh(torch.mul(2, z) / 0.7), y),
    "twice": lambda z, y: entropy(z, y) + torch.nn.CrossEntropyLoss()(input=z[0], target=y[0]),
    "where": lambda z, y: entropy(z, y) if z.shape[-1] == 7 and z.ndim == 3 else None,
}


@pytest.mark.parametrize("asked", ODD.values(), ids=ODD)
def test_losses_that_models_write_themselves(asked):
    model, ids = OddForCausalLM(asked), torch.tensor([[1, 2, 3, 4], [0, 6, 5, 1]])
    given = {"input_ids": ids, "labels": ids}
    want, gradients = run(model, given)
    out, found = run(patch_causal_lm(model), given)
    assert "logits" not in out
    torch.testing.assert_close(out["loss"], want["loss"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, gradients, rtol=1e-5, atol=1e-6)


REFUSED = {
    "does 'argmax' to": lambda z, y: z.argmax(-1),
    "does 'softmax' to": lambda z, y: torch.softmax(z, -1),
    "does 'log_softmax' to": lambda z, y: z.log_softmax(-1),
    "does 'stack' to": lambda z, y: torch.stack([z]),
    "does 'add' to": lambda z, y: z + 1,
    "does 'eq' to": lambda z, y: z == 1,
    "does 'setitem' to": lambda z, y: z.__setitem__(0, 1.0),
    "takes tanh twice of": lambda z, y: entropy(z.tanh().tanh(), y),
    "takes a part of the vocabulary": lambda z, y: entropy(z[..., :5], y),
    r"takes a part of the vocabulary, \(slice": lambda z, y: z[:, 0, 2],
    r"takes \[a tensor": lambda z, y: entropy(z[y > 2], y[y > 2]),
    "asks for the shape": lambda z, y: z.view(-1, 14),
    "multiplies by -1": lambda z, y: entropy(z * -1, y),
    "multiplies by what is no plain number": lambda z, y: z * torch.ones(7),
    "takes the cross-entropy over other classes": lambda z, y: torch.nn.functional.cross_entropy(z, y),
    "weights classes": lambda z, y: entropy(z, y, weight=torch.ones(7)),
    "takes no cross_entropy": lambda z, y: torch.zeros(()),
}


@pytest.mark.parametrize(("words", "asked"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_deferred_is_named(words, asked):
    model, ids = patch_causal_lm(OddForCausalLM(asked)), torch.tensor([[1, 2, 3, 4]])
    with pytest.raises(TypeError, match=f"OddForCausalLM cannot be patched: with labels its forward {words}"):
        model(ids, ids)
    assert model(ids)["logits"].shape == (1, 4, 7)


def test_shift_labels_are_not_shifted_again():
    model, ids = patch_causal_lm(OddForCausalLM(ODD["shifted"])), torch.tensor([[1, 2, 3, 4]])
    with pytest.raises(TypeError, match="OddForCausalLM cannot be patched.* shift_labels"):
        model(ids, shift_labels=ids)


def _fsdp(rank, size, wrapped):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (size,))
    model = patch_causal_lm(build("Llama"), chunk_tokens=5)
    for module in [*model.model.layers, *([model.lm_head] if wrapped else []), model]:
        fully_shard(module, mesh=mesh)
    out, gradients = run(model, batch(seed=rank))
    assert out.logits is None
    return out.loss.detach(), {name: x.full_tensor() for name, x in gradients.items()}


@pytest.mark.parametrize("wrapped", [False, True], ids=["with the model", "alone"])
def test_fsdp(wrapped):
    model = build("Llama")
    losses = [model(**batch(seed=rank)).loss for rank in range(2)]
    sum(losses).backward()  # `run` takes twice the loss, FSDP the mean
    want = {name: p.grad for name, p in model.named_parameters()}
    for (found, gradients), loss in zip(processes(2, _fsdp, wrapped), losses, strict=True):
        torch.testing.assert_close(found, loss.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradients, want, rtol=1e-5, atol=1e-5)

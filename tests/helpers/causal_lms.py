"""Small causal LMs of transformers, samples, and the loss of one process that every engine is held to."""

from __future__ import annotations

import torch
import transformers
from torch.nn.functional import cross_entropy, pad

VOCABULARY = 61
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}

THREE_STEPS = {
    "use_cpu": True, "max_steps": 3, "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1,
    "max_grad_norm": 0.5, "learning_rate": 0.1, "lr_scheduler_type": "constant", "optim": "sgd",
    "weight_decay": 0.0, "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
    "remove_unused_columns": False, "seed": 7,
}  # fmt: skip
"""Arguments of the Trainer for a short training that can be compared."""


def model_of(kind="Llama", heads=4, kv_heads=2, **options):
    """The same random weights on every rank."""
    options = {**TINY, "num_attention_heads": heads, "num_key_value_heads": kv_heads, **options}
    config = getattr(transformers, f"{kind}Config")(**options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return drawn(model)


def drawn(model):
    """The model in training, with random weights that are larger than those it begins with."""
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.2) if p.dim() > 1 else p.add_(torch.randn_like(p) * 0.1)
    return model.train()


def hybrid_of():
    """A gated delta rule and an attention layer."""
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    dims = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    types = ["linear_attention", "full_attention"]
    return model_of("OlmoHybrid", layer_types=types, **heads, **dims)


def dataset(count, tokens=40, seed=1, ignored=0.2):
    """Samples whose labels are ignored here and there; the first has none for most of it."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i in range(count):
        ids = torch.randint(3, VOCABULARY, (tokens,), generator=generator)
        labels = ids.masked_fill(torch.rand(tokens, generator=generator) < ignored, -100)
        if i % 2 == 0:
            labels[: tokens * 3 // 4] = -100  # under some layouts a rank has no label at all
        found.append({"input_ids": ids, "labels": labels})
    return found


def plain_loss(model, sample):
    """Mean over the valid labels of one sample, by the unmodified model."""
    ids, labels = sample["input_ids"][None], sample["labels"][None]
    kept = {name: x[None] for name, x in sample.items() if name == "position_ids"}
    logits = model(input_ids=ids, use_cache=False, **kept).logits.float()
    target = pad(labels, (0, 1), value=-100)[:, 1:]
    total = cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
    return total / (target != -100).sum().clamp(min=1)


def worst(found, want):
    """The largest relative error over tensors by name."""
    assert found.keys() == want.keys()
    return max(
        ((found[name].double() - want[name]).norm() / want[name].double().norm().clamp_min(1e-12)).item()
        for name in want
    )

"""Trainers of transformers and of TRL on the small models, their texts, and what they find."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers.trainer  # noqa: F401 - here once, with what it imports, for ranks that are forked
from causal_lms import VOCABULARY, hybrid_of, model_of

METRICS = {"SFT": "mean_token_accuracy", "DPO": "rewards/margins", "KTO": "kl"}
"""By kind of TRL's trainers, a figure that they log."""


def forget() -> None:
    """Let the next Accelerator of this process ask anew how many ranks there are."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    if (engine := sys.modules.get("transformers.integrations.deepspeed")) is not None:
        engine.unset_hf_deepspeed_config()
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def accuracy(predicted: Any) -> dict[str, float]:
    """Of the next token, with unshifted labels as the plain Trainer hands them over; and their number."""
    said, labels = np.argmax(predicted.predictions[:, :-1], -1), predicted.label_ids[:, 1:]
    right = float((said == labels)[labels != -100].mean())
    return {"accuracy": right, "shape": predicted.predictions.shape[1]}


def logged(trainer: Any, *names: str) -> dict[str, list[float]]:
    """What a trainer has logged by these names, in order."""
    return {name: [entry[name] for entry in trainer.state.log_history if name in entry] for name in names}


def trl_trained(
    kind: str, arguments: Callable[[], Any], *, lora: bool = False, hybrid: bool = False, **options: Any
) -> Any:
    """(figures by name of a training and an evaluation, the trainer); kind: of METRICS.

    arguments: makes them, once the model is there, whose parameters ZeRO-3 would shard as they are made.
    """
    import trl
    from datasets import Dataset

    rows = {"SFT": texts, "DPO": preferences, "KTO": unpaired}[kind]
    model = hybrid_of() if hybrid else model_of()
    if kind != "SFT":
        options["ref_model"] = None if lora else model_of()
        with torch.no_grad():
            model.lm_head.weight.mul_(1.1)  # not the reference's, or every margin would be 0 at first
    if lora:
        from peft import LoraConfig

        torch.manual_seed(3)
        adapters = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        options["peft_config"] = adapters
    trainer = getattr(trl, f"{kind}Trainer")(
        model, args=arguments(), train_dataset=Dataset.from_list(rows(24)),
        eval_dataset=Dataset.from_list(rows(5)), processing_class=tokenizer(), **options,
    )  # fmt: skip
    trainer.train()
    evaluated = trainer.evaluate()
    figures = logged(trainer, "loss", "grad_norm", METRICS[kind], "num_tokens")
    names = ("eval_loss", f"eval_{METRICS[kind]}", "eval_accuracy", "eval_shape")
    figures["evaluation"] = [evaluated[name] for name in names if name in evaluated]
    return figures, trainer


def tokenizer(count=VOCABULARY):
    """Words w3, w4, ... are tokens 3, 4, ... of `count`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{i}": i for i in range(3, count)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", model_max_length=512
    )


def words(count, generator):
    return " ".join(f"w{i}" for i in torch.randint(3, VOCABULARY, (count,), generator=generator).tolist())


def texts(count):
    """Samples for SFT, of unequal length."""
    generator = torch.Generator().manual_seed(5)
    return [{"text": words(12 + 7 * (i % 5), generator)} for i in range(count)]


def preferences(count):
    generator = torch.Generator().manual_seed(6)
    return [
        {
            "prompt": words(5 + i % 3, generator) + " ",
            "chosen": words(9 + 4 * (i % 4), generator),
            "rejected": words(6 + 5 * (i % 3), generator),
        }
        for i in range(count)
    ]


def unpaired(count):
    """Samples for KTO."""
    return [
        {"prompt": pair["prompt"], "completion": pair["chosen"], "label": i % 2 == 0}
        for i, pair in enumerate(preferences(count))
    ]

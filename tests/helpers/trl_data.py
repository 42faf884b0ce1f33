"""Texts and preferences for TRL's trainers, and a tokenizer of their words."""

import torch
from causal_lms import VOCABULARY


def tokenizer():
    """Words w3, w4, ... are tokens 3, 4, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
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

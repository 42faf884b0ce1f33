"""What Megatron's data sets make on the host for a sample, counted by shape: no mask of pairs of tokens."""

import logging
import os
import sys
from itertools import pairwise

import pytest
from ranks import on_ranks

pytest.importorskip("megatron.training", reason="megatron.training comes with megatron-core from 0.19 on")
pytest.importorskip("tensorboard")

import prepare_bytes
from live import LiveBytes
from ranks import processes
from torch.utils.data import default_collate
from versions import BURST, DOCUMENTS, MODEL, TEXTS

LENGTHS = 2048, 2**20
A_TOKEN = 128
"""Most bytes of a sample that are alive at once, for each token: 128 MiB at 1M tokens.

A dense mask of Megatron's makes more than 8 bytes for each pair of tokens.
"""
CP8 = ["--context-parallel-size", "8"]
COMMANDS = {
    "the flag": [*BURST, *CP8],
    "a spec": [*CP8, "--spec", "burst_mcore.megatron.spec", "burst_layer_spec"],
    "one rank": [*BURST, "--eod-mask-loss"],
    "documents": [*BURST, *CP8, DOCUMENTS],
    "mock data": [*BURST, *CP8, "--mock-data"],
    "a blend": [*BURST, *CP8],
}


class Tokens:
    """A tokenizer as far as a configuration of data sets asks."""

    pad, eod, vocab_size = 0, 1, 257


def _parsed(words):
    from megatron.training import arguments, global_vars
    from train_bytes_gpt import DEFAULTS

    from burst_mcore.megatron import cpu

    sys.argv = ["train.py", *MODEL, *words, *cpu.CPU_ARGUMENTS]
    sizes = dict(pairwise(words))
    os.environ["WORLD_SIZE"] = sizes.get("--context-parallel-size", "1")
    args = arguments.parse_args()
    arguments.validate_args(args, DEFAULTS)
    global_vars._GLOBAL_ARGS = args
    return args


def _made(rank, size, prefix):
    """Bytes that the data set of each command makes for each token of a micro batch, by length."""
    import train_bytes_gpt
    from megatron.core import parallel_state
    from megatron.core.datasets.gpt_dataset import MockGPTDataset

    from burst_mcore.megatron import cpu, launcher

    cpu.enable_training()
    launcher.install()
    parallel_state.initialize_model_parallel()
    found = {}
    for name, words in COMMANDS.items():
        paths = ["0.3", prefix, "0.7", prefix] if name == "a blend" else [prefix]
        data = [] if name == "mock data" else ["--data-path", *paths, "--data-cache-path", f"{prefix}.cache"]
        for tokens in LENGTHS:
            lengths = ["--seq-length", str(tokens), "--max-position-embeddings", str(tokens)]
            args = _parsed([*words, *data, *lengths])
            with pytest.MonkeyPatch.context() as patch:
                if name == "mock data":
                    patch.setattr(train_bytes_gpt, "GPTDataset", MockGPTDataset)
                train = train_bytes_gpt.datasets_provider([4, 0, 0])[0]
            with LiveBytes() as made:
                batch = default_collate([train[index] for index in range(args.micro_batch_size)])
            assert batch["tokens"].shape == (args.micro_batch_size, tokens)
            found[name, tokens] = made.peak / batch["tokens"].numel()
            if found[name, tokens] > A_TOKEN:  # more than grows with tokens: not to be tried at 1M
                break
    return found


def test_a_sample_of_a_million_tokens_takes_bytes_by_the_token(tmp_path):
    prepare_bytes.write(tmp_path / "text", iter(TEXTS))
    (made,) = processes(1, _made, str(tmp_path / "text"))
    for name in COMMANDS:
        short, long = (made.get((name, tokens)) for tokens in LENGTHS)
        assert 24 <= short <= A_TOKEN, name
        assert long <= 1.05 * short, name


@on_ranks(1)
def test_a_mask_that_a_script_insists_on_is_refused_where_it_is_large(rank, size):
    """A script's own configuration that asks for a mask, with burst attention and without."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    from burst_mcore.megatron import cpu, launcher

    cpu.enable_training()
    launcher.install()
    said = []
    logger = logging.getLogger("burst_mcore.megatron.checks")
    logger.addHandler(type("Kept", (logging.Handler,), {"emit": lambda self, record: said.append(record)})())

    def config(tokens):
        fields = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False)
        return GPTDatasetConfig(0, tokens, tokenizer=Tokens(), create_attention_mask=True, **fields)

    assert not _parsed(BURST).create_attention_mask_in_dataloader
    assert config(2**14).create_attention_mask
    with pytest.raises(ValueError, match="of GPTDatasetConfig asks for a dense mask of 16385 x 16385"):
        config(2**14 + 1)
    assert _parsed([]).create_attention_mask_in_dataloader
    assert config(2**14 + 1).create_attention_mask
    (record,) = said
    assert record.getMessage().startswith("burst_mcore: the data loader builds no attention mask")

"""What Megatron's data sets make on the host for a sample, by every documented command, counted by shape."""

import logging
import os
import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("megatron.training", reason="megatron.training comes with megatron-core from 0.19 on")
pytest.importorskip("tensorboard")

import prepare_bytes
import torch
from ranks import processes
from test_training import BURST, MODEL
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "patches" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LENGTHS = 2048, 2**20
A_TOKEN = 128
"""Bytes that a sample may make for each token, those dropped again included: 128 MiB at 1M tokens.

A dense mask of Megatron's makes more than 8 bytes for each pair of tokens.
"""


def _commands():
    """Megatron's flags of every documented command that starts the launcher or chooses burst attention."""
    for page in PAGES:
        text = re.sub(r"\\\n\s*", " ", page.read_text())
        for number, line in enumerate(
            re.findall(r"^(?:srun .*)?(?:torchrun|python) .*\.py .*$", text, re.MULTILINE)
        ):
            if "burst" in line and "megatron" in line:
                words = shlex.split(line)
                script = next(i for i, word in enumerate(words) if word.endswith(".py"))
                yield (
                    f"{page.name}: {words[script]}, {number}",
                    [word for word in words[script + 1 :] if word not in ("...", "$@")],
                )


OTHERS = {
    "mock data": [*BURST, "--context-parallel-size", "8", "--mock-data"],
    "SFT": [*BURST, "--context-parallel-size", "8", "--sft"],
    "a blend": [*BURST, "--context-parallel-size", "8", "a blend"],
    "documents' positions": [*BURST, "--context-parallel-size", "8", "--reset-position-ids"],
    "a spec": ["--context-parallel-size", "8", "--spec", "burst_mcore.megatron.spec", "burst_layer_spec"],
    "one rank": [*BURST, "--eod-mask-loss"],
}


class Made(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make, not of views and what is changed in place."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in given:
            self.bytes += out.numel() * out.element_size()
        return out


class Talk:
    """A tokenizer of conversations, for SFT: 100 tokens a turn."""

    pad, eod, vocab_size = 0, 1, 257

    def tokenize_conversation(self, conversation, **_):
        tokens = torch.full((100 * len(conversation),), 7).numpy()
        return tokens, tokens


class _Talks:
    """A builder of one data set: Megatron's for SFT, of nine conversations that are packed."""

    def __init__(self, kind, samples, on_rank, config):
        self.config = config

    def build(self):
        from megatron.training.datasets.sft_dataset import SFTDataset

        self.config.tokenizer, self.config.context_parallel_size = Talk(), 8
        talk = SFTDataset.__new__(SFTDataset)
        talk.config, talk.indices = self.config, [0, 0]
        talk.dataset = [[{"role": "system"}, {"role": "user"}] * 9]
        return [talk]


def _parsed(words):
    from megatron.training import arguments, global_vars
    from train_bytes_gpt import DEFAULTS

    from burst_mcore.megatron import cpu

    sys.argv = ["train.py", *MODEL, "--train-iters", "1", *words, *cpu.CPU_ARGUMENTS]
    sizes = dict(pairwise(words))
    os.environ["WORLD_SIZE"] = sizes.get("--context-parallel-size", "1")
    args = arguments.parse_args()
    arguments.validate_args(args, DEFAULTS)
    global_vars._GLOBAL_ARGS = args
    return args


def _data_set(words, data):
    """The arguments and the training set of a command, as a script makes it."""
    import train_bytes_gpt
    from megatron.core.datasets.gpt_dataset import MockGPTDataset

    if "a blend" in words:
        words = [word for word in words if word != "a blend"]
        data = [*data, "--data-path", "0.3", data[1], "0.7", data[1]]
    if "--hybrid-layer-pattern" in words:
        words = [*words, "--num-layers", str(len(words[words.index("--hybrid-layer-pattern") + 1]))]
    args = _parsed([*words, *([] if "--mock-data" in words else data)])
    with pytest.MonkeyPatch.context() as patch:
        if "--mock-data" in words:
            patch.setattr(train_bytes_gpt, "GPTDataset", MockGPTDataset)
        if "--sft" in words:
            patch.setattr(train_bytes_gpt, "BlendedMegatronDatasetBuilder", _Talks)
        return args, train_bytes_gpt.datasets_provider([4, 0, 0])[0]


def _made(rank, size, commands, data):
    """Bytes that the data set of each command makes for each token of a micro batch, by length."""
    from megatron.core import parallel_state

    from burst_mcore.megatron import cpu, launcher

    cpu.enable_training()
    launcher.install()
    parallel_state.initialize_model_parallel()
    found = {}
    for name, words in commands:
        for tokens in LENGTHS:
            lengths = ["--seq-length", str(tokens), "--max-position-embeddings", str(tokens)]
            args, train = _data_set([*words, *lengths], data)
            with Made() as made:
                batch = default_collate([train[index] for index in range(args.micro_batch_size)])
            assert batch["tokens"].shape == (args.micro_batch_size, tokens)
            found[name, tokens] = made.bytes / batch["tokens"].numel()
            if found[name, tokens] > A_TOKEN:  # more than grows with tokens: not to be tried at 1M
                break
    return found


def _insisted(rank, size):
    """A script's own configuration that asks for a mask, with burst attention and without."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    from burst_mcore.megatron import cpu, launcher

    cpu.enable_training()
    launcher.install()
    said = []
    logger = logging.getLogger("burst_mcore.megatron.asked")
    logger.addHandler(type("Kept", (logging.Handler,), {"emit": lambda self, record: said.append(record)})())

    def config(tokens):
        fields = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False)
        return GPTDatasetConfig(0, tokens, tokenizer=Talk(), create_attention_mask=True, **fields)

    for words, is_burst in ((BURST, True), ([], False)):
        assert _parsed(words).create_attention_mask_in_dataloader is not is_burst
        assert config(2**14).create_attention_mask
        if is_burst:
            with pytest.raises(
                ValueError, match="of GPTDatasetConfig asks for a dense mask of 16385 x 16385"
            ):
                config(2**14 + 1)
        else:
            config(2**14 + 1)
    assert [record.getMessage().split(",")[0] for record in said] == [
        "burst_mcore: the data loader builds no attention mask"
    ]


def test_a_mask_that_a_script_insists_on_is_refused_where_it_is_large():
    processes(1, _insisted)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("data") / "text"
    prepare_bytes.write(prefix, iter([b"the quick brown fox %d; " % i * (1 + 7 * i % 90) for i in range(60)]))
    return ["--data-path", str(prefix), "--data-cache-path", str(prefix.parent / "cache")]


COMMANDS = [*_commands(), *OTHERS.items()]


@pytest.fixture(scope="module")
def made(data):
    return processes(1, _made, COMMANDS, data)[0]


@pytest.mark.parametrize("name", [name for name, _ in COMMANDS])
def test_a_sample_of_a_million_tokens_takes_bytes_by_the_token(name, made):
    short, long = (made.get((name, tokens)) for tokens in LENGTHS)
    assert 24 <= short <= A_TOKEN
    assert long <= 1.05 * short


def test_the_commands_of_all_pages_are_found():
    pages = [name.split(":")[0] for name, _ in _commands()]
    assert sum(page.startswith("megatron") for page in pages) >= 3
    assert {"README.md", "slurm.md"} <= set(pages)

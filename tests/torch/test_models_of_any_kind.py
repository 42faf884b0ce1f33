"""A model that is not of transformers, torch's own recompute, whole batches, the launcher: as one process."""

import os
import sys
from functools import partial
from pathlib import Path

import limits
import pytest
import torch
from causal_lms import VOCABULARY, dataset, model_of, worst
from loops import assert_alike, gradients_of, mesh_of
from ranks import on_ranks, processes
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from burst_mcore.scripts import launch
from burst_mcore.torch import parallelize

HEADS, HEAD_DIM = 3, 8  # 3 heads: 2 ranks cannot share them
WIDTH = HEADS * HEAD_DIM
ENDS = (0, 13, 31)  # documents of prime lengths, and a sequence of one
TOKENS = ENDS[-1]


class Decoder(nn.Module):
    """One attention layer between an embedding of tokens and places, and a head; in float64."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.into, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, ids, positions, attend):
        x = self.tokens(ids) + self.places(positions)
        q, k, v = self.into(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        return self.head(x + attend(q, k, v).flatten(2))


def _sample():
    (sample,) = dataset(1, tokens=TOKENS, ignored=0.3)
    document = torch.bucketize(torch.arange(TOKENS), torch.tensor(ENDS[1:]), right=True)
    positions = torch.arange(TOKENS) - torch.tensor(ENDS)[document]
    target = pad(sample["labels"][1:], (0, 1), value=-100)
    target[ENDS[1] - 1] = -100  # no document has a token behind its last
    return sample["input_ids"][None], sample["labels"][None], positions[None], target[None], document


def _total(logits, target):
    return cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")


def _of_one():
    ids, _, positions, target, document = _sample()
    allowed = (document[:, None] == document) & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()

    def dense(*heads_last):
        q, k, v = (x.transpose(1, 2) for x in heads_last)
        return scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2)

    model = Decoder()
    loss = _total(model(ids, positions, dense), target) / (target >= 0).sum()
    loss.backward()
    return loss.item(), gradients_of(model)


def _on_ranks(rank, size, recomputed):
    mesh = mesh_of(size)
    model = Decoder()
    cp = parallelize(model, mesh, loss="model", config={"layout": "striped"})
    engine = DistributedDataParallel(model)
    ids, labels, positions, _, _ = _sample()
    batch = cp.shard({"input_ids": ids, "labels": labels, "position_ids": positions})
    attend = partial(cp.attention, mask=cp.mask(documents=torch.tensor(ENDS)))
    inputs = batch["input_ids"], batch["position_ids"], attend
    logits = checkpoint(engine, *inputs, use_reentrant=False) if recomputed else engine(*inputs)
    target = batch["shift_labels"]
    loss = cp.whole_loss(_total(logits, target), (target >= 0).sum())
    loss.backward()
    return loss.item(), gradients_of(model)


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_model_that_is_not_of_transformers(recomputed):
    """Its attention is cp.attention, with documents that end within a rank's rows."""
    assert_alike(processes(2, _on_ranks, recomputed), _of_one(), 1e-12, 1e-12)


def _wrapped(rank, size):
    """Layers in checkpoint_wrapper, put around them before parallelize, and fully_shard."""
    mesh, model = mesh_of(size), model_of()
    kind = type(model.model.layers[0])
    how = {"checkpoint_wrapper_fn": checkpoint_wrapper, "check_fn": lambda module: isinstance(module, kind)}
    apply_activation_checkpointing(model, **how)
    cp = parallelize(model, mesh)
    fully_shard(model, mesh=mesh)
    loss = model(**cp.shard(_rows()), use_cache=False).loss
    loss.backward()
    found = {name.replace("_checkpoint_wrapped_module.", ""): x for name, x in gradients_of(model).items()}
    return loss.item(), found


def test_layers_in_torchs_checkpoint_wrapper():
    model = model_of()
    loss = model(**_rows(), use_cache=False).loss
    loss.backward()
    assert_alike(processes(2, _wrapped), (loss.item(), gradients_of(model)), 1e-6, 2e-6)


def _rows():
    return {name: torch.stack([sample[name] for sample in dataset(2, tokens=29)]) for name in dataset(1)[0]}


@on_ranks(2)
def test_a_model_that_is_saved_is_a_plain_one(rank, size, tmp_path):
    """Saved after a step over ranks, as for vLLM."""
    mesh, model, plain = mesh_of(size), model_of(), model_of()
    cp = parallelize(model, mesh, checkpointing="segment")
    fully_shard(model, mesh=mesh)
    model(**cp.shard(_rows()), use_cache=False).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=whole)
    if rank == 0:
        model.save_pretrained(tmp_path / "ours", state_dict=weights)
        plain.save_pretrained(tmp_path / "plain")
        ours, want = ((tmp_path / name / "config.json").read_text() for name in ("ours", "plain"))
        assert ours == want and "burst" not in ours
        ours, want = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "plain"))
        assert worst(ours, want) == 0  # and the names are the same
        again = type(plain).from_pretrained(tmp_path / "ours")
        torch.testing.assert_close(again(**_rows()).loss, plain(**_rows()).loss)


SCRIPT = """
import inspect
import sys
from accelerate import Accelerator
from beside_it import NAME
assert __name__ == "__main__"
here = [getattr(Accelerator, name) for name in ("_prepare_cp", "_prepare_deepspeed")]
ours = [inspect.getclosurevars(x).nonlocals["function"].__module__ for x in here if hasattr(x, "__wrapped__")]
print(NAME, sys.argv[1:], *ours)
"""


def _launched(*words, folder, launcher="burst_mcore.torch", path=""):
    return limits.run(
        [sys.executable, "-W", "ignore", "-m", launcher, *words], cwd=folder,
        env={"PATH": path, "PYTHONPATH": f"{Path(__file__).parents[2]}{os.pathsep}{folder}"},
    )  # fmt: skip


def test_the_launcher(tmp_path):
    """A script that stays as it is finds ours in Accelerate, its own arguments, and a module beside it."""
    pytest.importorskip("accelerate")
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "train_mine.py").write_text(SCRIPT)
    (folder / "beside_it.py").write_text("NAME = 'mine'")
    done = _launched("mine/train_mine.py", "--lr", "1", folder=tmp_path)
    assert done.stdout.startswith("mine ['--lr', '1']"), done.stderr
    assert done.stdout.strip().endswith("burst_mcore.torch.accelerate")


@pytest.mark.slow
def test_a_command_that_starts_ranks_itself(tmp_path):
    """A command of an installed package starts torchrun, as `trl sft` does: its ranks find ours too."""
    pytest.importorskip("deepspeed")
    pytest.importorskip("accelerate")
    (tmp_path / "train_mine.py").write_text(SCRIPT)
    (tmp_path / "beside_it.py").write_text("import os\nNAME = 'rank ' + os.environ['RANK']")
    installed = tmp_path / "mine-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[console_scripts]\ntrain-mine = my_command:main\n")
    (tmp_path / "my_command.py").write_text(
        "import subprocess, sys\ndef main():\n"
        "    start = [sys.executable, *'-m torch.distributed.run --standalone --nproc-per-node 2'.split()]\n"
        "    return 7 + subprocess.call([*start, 'train_mine.py', *sys.argv[1:]])\n"
    )
    launcher = "burst_mcore.deepspeed"
    done = _launched("train-mine", "--lr", "1", folder=tmp_path, launcher=launcher, path=os.defpath)
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank ")) == [
        f"rank {rank} ['--lr', '1'] {launcher}.accelerate" for rank in range(2)
    ], done.stderr
    assert done.returncode == 7


def test_the_launcher_without_a_script(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    for words, said in (("no.py",), "no such script: no.py"), (("-m", "no.module"), "no such module: no.mod"):
        monkeypatch.setattr(sys, "argv", ["burst_mcore.torch", *words])
        with pytest.raises(SystemExit, match=f"^burst_mcore.torch: {said}"):
            launch("burst_mcore.torch", lambda: None)

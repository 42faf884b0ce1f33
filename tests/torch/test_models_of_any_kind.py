"""A model that is not of transformers; generate; torch's own recompute; the launcher: against one process."""

import logging
import os
import sys
from functools import partial
from pathlib import Path

import limits
import pytest
import torch
from causal_lms import VOCABULARY, dataset, model_of, worst
from ranks import processes
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from burst_mcore.rollouts import fold
from burst_mcore.torch import parallelize
from burst_mcore.transformers.models.strategies import WholeBatch
from burst_mcore.transformers.prepare import sequence_of
from burst_mcore.wrap import while_set

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
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def _on_ranks(rank, size, recomputed):
    logging.getLogger("burst_mcore").setLevel("ERROR")
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
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
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_model_that_is_not_of_transformers(recomputed):
    """Its attention is cp.attention, with documents that end within a rank's rows."""
    want, gradients = _of_one()
    for loss, found in processes(2, _on_ranks, recomputed):
        assert loss == pytest.approx(want, rel=1e-12)
        assert worst(found, gradients) < 1e-12


def _generated(rank, size):
    logging.getLogger("burst_mcore").setLevel("ERROR")
    model = model_of(kind="Qwen3")
    parallelize(model, init_device_mesh("cpu", (size,), mesh_dim_names=("cp",)), config={"layout": "zigzag"})
    with torch.no_grad():
        return _answers(model)


def _answers(model):
    model.eval()
    how = {"max_new_tokens": 7, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    rows = torch.stack([sample["input_ids"] for sample in dataset(2, tokens=23)])
    said = model.generate(rows, attention_mask=torch.ones_like(rows), **how)
    return said.sequences, torch.stack(said.logits)


def test_generate():
    """The prompt, of a prime number of tokens, is sharded; the answer and its logits are one process's."""
    sequences, logits = _answers(model_of(kind="Qwen3"))
    for said, theirs in processes(2, _generated):
        assert torch.equal(said, sequences)
        torch.testing.assert_close(theirs, logits, rtol=1e-4, atol=1e-5)


def _wrapped(rank, size, order):
    """Layers in checkpoint_wrapper, put around them before parallelize or after, and fully_shard."""
    logging.getLogger("burst_mcore").setLevel("ERROR")
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    model = model_of()
    kinds = type(model.model.layers[0])
    wrap = partial(
        apply_activation_checkpointing,
        model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda module: isinstance(module, kinds),
    )  # fmt: skip
    if order == "before":
        wrap()
    cp = parallelize(model, mesh)
    if order == "after":
        wrap()
    fully_shard(model, mesh=mesh)
    loss = model(**cp.shard(_rows()), use_cache=False).loss
    loss.backward()
    named = {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}
    return loss.item(), {name: p.grad.full_tensor() for name, p in named.items()}


def _rows():
    return {name: torch.stack([sample[name] for sample in dataset(2, tokens=29)]) for name in dataset(1)[0]}


def _saved(rank, size, folder):
    """Train a step over ranks, and save the model as for vLLM."""
    logging.getLogger("burst_mcore").setLevel("ERROR")
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    model = model_of()
    cp = parallelize(model, mesh, checkpointing="segment")
    fully_shard(model, mesh=mesh)
    model(**cp.shard(_rows()), use_cache=False).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=whole)
    if rank == 0:
        model.save_pretrained(folder, state_dict=weights)


def test_a_model_that_is_saved_is_a_plain_one(tmp_path):
    processes(2, _saved, str(tmp_path / "ours"))
    model = model_of()
    model.save_pretrained(tmp_path / "plain")
    ours, plain = ((tmp_path / name / "config.json").read_text() for name in ("ours", "plain"))
    assert ours == plain and "burst" not in ours
    ours, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "plain"))
    assert worst(ours, plain) == 0  # and the names are the same
    again = type(model).from_pretrained(tmp_path / "ours")
    torch.testing.assert_close(again(**_rows()).loss, model(**_rows()).loss)


def _loss_with_a_critic(policy, batch, whole):
    """(the model's loss with that of a head on its hidden states, gradients); whole makes rows of parts."""
    torch.manual_seed(3)
    head = nn.Linear(policy.config.hidden_size, 1)
    if whole is not None:
        policy, head = DistributedDataParallel(policy), DistributedDataParallel(head)
    out = policy(**batch, output_hidden_states=True)
    values = head(out.hidden_states[-1])
    values = values if whole is None else whole(values, 29)
    loss = out.loss + (values - torch.arange(29.0)[:, None]).square().mean() / 50
    loss.backward()
    modules = [getattr(module, "module", module) for module in (policy, head)]
    return loss.item(), {
        f"{i} {name}": p.grad for i, module in enumerate(modules) for name, p in module.named_parameters()
    }


def _critic(rank, size):
    logging.getLogger("burst_mcore").setLevel("ERROR")
    model = model_of()
    cp = parallelize(model, init_device_mesh("cpu", (size,), mesh_dim_names=("cp",)))
    return _loss_with_a_critic(model, cp.shard(_rows()), cp.gather)


def test_a_head_on_hidden_states_beside_the_loss():
    want, gradients = _loss_with_a_critic(model_of(), _rows(), None)
    for loss, found in processes(2, _critic):
        assert loss == pytest.approx(want, rel=1e-6)
        assert worst(found, gradients) < 4e-6


def _sharding(rank, size):
    """Outputs of an evaluation of whole batches, which the model shards, as under Accelerate."""
    logging.getLogger("burst_mcore").setLevel("ERROR")
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    model = model_of().eval()
    cp = parallelize(model, mesh, loss="model")
    labelled, tree = _rows(), fold([torch.arange(3, 20), torch.arange(3, 15), torch.arange(4, 9)]).batch
    shifted = {
        "input_ids": labelled["input_ids"],
        "shift_labels": pad(labelled["labels"], (0, 1), value=-100)[:, 1:],
    }
    want = model(**cp.shard(tree)).loss.item()
    sequence = sequence_of(model)
    with while_set(sequence, batches=WholeBatch(sequence)):
        found = [model(**batch) for batch in (labelled, shifted)]
        assert model(**tree).loss.item() == want
        with while_set(sequence, loss_only=True):
            assert model(**labelled).logits is None
    return [(out.loss.item(), out.logits.detach()) for out in found]


def test_a_model_that_shards_its_batches():
    out = model_of().eval()(**_rows())
    for found in processes(2, _sharding):
        for loss, logits in found:
            assert loss == pytest.approx(out.loss.item(), rel=1e-6)
            torch.testing.assert_close(logits, out.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_layers_in_torchs_checkpoint_wrapper(order):
    model = model_of()
    loss = model(**_rows(), use_cache=False).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for found, theirs in processes(2, _wrapped, order):
        assert found == pytest.approx(loss.item(), rel=1e-6)
        assert worst(theirs, gradients) < 2e-6


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


LAUNCHERS = {
    "burst_mcore.torch": "burst_mcore.torch.accelerate",
    "burst_mcore.deepspeed": "burst_mcore.deepspeed.accelerate.model",
}
"""By launcher, whose functions stand in Accelerate."""


def _launched(*words, folder, launcher="burst_mcore.torch", path=""):
    return limits.run(
        [sys.executable, "-W", "ignore", "-m", launcher, *words], cwd=folder,
        env={"PATH": path, "PYTHONPATH": f"{Path(__file__).parents[2]}{os.pathsep}{folder}"},
    )  # fmt: skip


@pytest.mark.parametrize("way", ["script", pytest.param("module", marks=pytest.mark.slow)])
def test_the_launcher(tmp_path, way):
    """A script that stays as it is finds ours in Accelerate, its own arguments, and a module beside it."""
    pytest.importorskip("accelerate")
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "train_mine.py").write_text(SCRIPT)
    (folder / "beside_it.py").write_text("NAME = 'mine'")
    words, where = (["mine/train_mine.py"], tmp_path) if way == "script" else (["-m", "train_mine"], folder)
    done = _launched(*words, "--lr", "1", folder=where)
    assert done.stdout.startswith("mine ['--lr', '1']"), done.stderr
    assert done.stdout.strip().endswith("burst_mcore.torch.accelerate")


@pytest.mark.parametrize(
    "launcher", [pytest.param("burst_mcore.torch", marks=pytest.mark.slow), "burst_mcore.deepspeed"]
)
def test_a_command_that_starts_ranks_itself(tmp_path, launcher):
    """A command of an installed package starts torchrun, as `trl sft` does: its ranks find ours too."""
    if launcher == "burst_mcore.deepspeed":
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
    done = _launched("train-mine", "--lr", "1", folder=tmp_path, launcher=launcher, path=os.defpath)
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank ")) == [
        f"rank {rank} ['--lr', '1'] {LAUNCHERS[launcher]}" for rank in range(2)
    ], done.stderr
    assert done.returncode == 7


@pytest.mark.slow
def test_accelerate_launch_starts_the_launcher(tmp_path):
    """Two ranks with cp_size 2, of a script; TRL's own script, by its name, says what it takes."""
    pytest.importorskip("accelerate")
    pytest.importorskip("trl")
    (tmp_path / "train_mine.py").write_text(SCRIPT)
    (tmp_path / "beside_it.py").write_text(
        "import os\nNAME = 'cp ' + os.environ['PARALLELISM_CONFIG_CP_SIZE']"
    )
    sizes = "--use_fsdp --fsdp_version 2 --use_parallelism_config --parallelism_config_cp_size 2".split()
    more = "--num_machines 1 --mixed_precision no --dynamo_backend no --main_process_port 0".split()
    start = [sys.executable, "-W", "ignore", "-m", "accelerate.commands.launch", *sizes, *more]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}

    def launched(ranks, *words):
        line = [*start, "--num_processes", ranks, "-m", "burst_mcore.torch", *words]
        return limits.run(line, cwd=tmp_path, env=environment)

    done = launched(2, "train_mine.py", "--lr", "1")
    assert done.stdout.splitlines() == ["cp 2 ['--lr', '1'] burst_mcore.torch.accelerate"] * 2, done.stderr
    assert "--dataset_name" in launched(1, "-m", "trl.scripts.sft", "--help").stdout


@pytest.mark.parametrize(
    "words",
    [
        *(pytest.param(words, marks=pytest.mark.slow) for words in ([], ["--help"], ["missing.py"])),
        ["-m", "missing.module"],
    ],
)
def test_the_launcher_without_a_script(tmp_path, words):
    done = _launched(*words, folder=tmp_path)
    assert (done.returncode == 0) == (words == ["--help"])
    missing = any("missing" in word for word in words)
    said = "no such" if missing else "usage: python -m burst_mcore.torch SCRIPT [ARGUMENTS]"
    assert said in done.stdout + done.stderr and ("no such" in done.stderr) == missing
    assert "Traceback" not in done.stderr

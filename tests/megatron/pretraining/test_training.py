"""Megatron's own trainer, started as a user would, on small models: from the flag to the checkpoint."""

import os
import re
import signal
from pathlib import Path

import pytest

pytest.importorskip("megatron.training", reason="megatron.training comes with megatron-core from 0.19 on")
pytest.importorskip("tensorboard")

import forked
import megatron.core.tokenizers.text  # both here once, with what they import, for ranks that are forked
import megatron.training.training  # noqa: F401
import prepare_bytes  # it needs megatron.core
from job import Job, JobFailedError  # it needs tensorboard
from ranks import torchrun
from versions import BURST, CP2, TEXTS
from versions import SMALL_MODEL as MODEL

from burst_mcore.megatron import launcher


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("data") / "text"
    assert prepare_bytes.write(prefix, iter(TEXTS))[0] == 20
    return ["--data-path", str(prefix), "--data-cache-path", str(prefix.parent / "cache")]


def train(folder, processes, data, *arguments, iterations=4):
    return forked_run(Job(folder, processes, [*MODEL, *data, "--train-iters", str(iterations), *arguments]))


def forked_run(job):
    """All iterations; the ranks are forked from here, where Megatron is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("job.start_processes", forked.start)
        return list(job.run())


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """One process with Megatron's own attention."""
    found = train(tmp_path_factory.mktemp("alone"), 1, data)
    assert [i.iteration for i in found] == [1, 2, 3, 4]
    assert found[-1].loss < found[0].loss
    return found


def assert_equal(got, want):
    assert [i.iteration for i in got] == [i.iteration for i in want]
    assert [i.loss for i in got] == pytest.approx([i.loss for i in want], rel=1e-4)
    assert [i.grad_norm for i in got] == pytest.approx([i.grad_norm for i in want], rel=1e-3)


SPEC = ["--spec", "burst_mcore.megatron.spec", "burst_layer_spec"]
CP4 = ["--context-parallel-size", "4"]
NODES = [*CP4, "--hierarchical-context-parallel-sizes", "2", "2"]
RINGS = {
    "by the flag": (2, [*BURST, *CP2, "--burst-backward", "query"]),
    "by a spec": (2, [*SPEC, *CP2, "--burst-backward", "kv"]),
    "striped": (2, [*BURST, *CP2, "--burst-layout", "striped"]),
    "fused loss": (2, [*BURST, *CP2, "--burst-fused-loss"]),
    "tensor parallel": (4, [*BURST, *CP2, "--tensor-model-parallel-size", "2"]),
    "data parallel": (4, [*BURST, *CP2]),
    "shared heads": (4, [*BURST, *NODES, "--burst-head-parallel", "2", "--burst-backward", "query"]),
    "a2a": (2, [*BURST, *CP2, "--cp-comm-type", "a2a"]),
    "all_gather": (2, [*BURST, *CP2, "--cp-comm-type", "all_gather"]),
    "p2p and a2a": (2, [*BURST, *CP2, "--cp-comm-type", "p2p", "a2a"]),
    "a2a+p2p": (4, [*BURST, *NODES, "--cp-comm-type", "a2a+p2p"]),
    "given rates": (
        2,
        [*BURST, *CP2, *"--burst-head-parallel auto --burst-ring auto --burst-rates 1 0.1 0.01".split()],
    ),
}
LIKE_OTHERS = ("a2a", "p2p and a2a", "given rates")
"""What the cells beside them find as well: these are for `make test-all`."""


@pytest.mark.proves("training runs", "CP 2 by the flag, by a spec, striped, with the fused loss")
@pytest.mark.proves("training runs", "TP 2 x CP 2, DP 2 x CP 2, CP 4 on a double ring with shared heads")
@pytest.mark.proves("training runs", "`--cp-comm-type` p2p, a2a, all_gather, a2a+p2p, a list")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LIKE_OTHERS else name for name in RINGS]
)
def test_rings_train_as_one_process(name, data, alone, tmp_path):
    ranks, arguments = RINGS[name]
    assert_equal(train(tmp_path, ranks, data, *arguments), alone)


@pytest.mark.proves("training runs", "segment recompute")
def test_with_a_recompute_policy(data, alone, tmp_path):
    segment = ["--burst-recompute", "segment", "--burst-recompute-keep", "0.3"]
    assert_equal(train(tmp_path, 2, data, *BURST, *CP2, *segment), alone)
    errors = [log.read_text() for log in (tmp_path / "log").rglob("stderr.log")]
    assert len(errors) == 2
    for said in errors:  # it is in effect: on zigzag such a cut does not pay
        assert "segment recompute: keep=0.3 is moved to 0.5" in said


INTERLEAVED = ["--num-layers", "4", "--num-layers-per-virtual-pipeline-stage", "1"]


@pytest.mark.proves("training runs", "PP 2 x CP 2, 1F1B and interleaved, with and without segment recompute")
@pytest.mark.parametrize(
    "schedule", [pytest.param([], marks=pytest.mark.slow), INTERLEAVED], ids=["1F1B", "interleaved"]
)
def test_with_pipeline_parallelism(schedule, data, tmp_path):
    stages = ["--pipeline-model-parallel-size", "2", *schedule]  # its stages start from seeds of their own
    alone = train(tmp_path / "alone", 2, data, *stages)
    segment = ["--burst-recompute", "segment", "--burst-recompute-keep", "0.5"] if schedule else []
    assert_equal(train(tmp_path / "ring", 4, data, *BURST, *CP2, *stages, *segment), alone)


@pytest.mark.proves("training runs", "EP 2 x CP 2")
def test_experts_behind_an_all_to_all(data, tmp_path):
    experts = ["--num-experts", "2", "--moe-router-topk", "1", "--moe-token-dispatcher-type", "alltoall"]
    experts += ["--moe-router-pre-softmax", "--expert-model-parallel-size", "2"]
    plain = train(tmp_path / "plain", 2, data, *experts)  # two data-parallel ranks, with an expert each
    assert_equal(train(tmp_path / "ring", 2, data, *BURST, *CP2, *experts), plain)


HYBRID = ["--hybrid-layer-pattern", "*-*-", "--num-layers", "4"]


@pytest.fixture(scope="module")
def hybrid_alone(data, tmp_path_factory):
    """A hybrid model, with Megatron's own attention, on one process."""
    stock = ["--spec", "stock_hybrid", "stack_spec"]
    return train(tmp_path_factory.mktemp("hybrid"), 1, data, *HYBRID, *stock)


@pytest.mark.proves("training runs", "HybridModel of attention and MLP layers, CP 2 and CP 4")
@pytest.mark.parametrize(
    ("size", "ours"),
    [
        ("2", BURST),
        pytest.param(
            "4", ["--spec", "burst_mcore.megatron.spec", "burst_hybrid_stack_spec"], marks=pytest.mark.slow
        ),
    ],
)
def test_a_hybrid_model(size, ours, data, hybrid_alone, tmp_path):
    ring = ["--context-parallel-size", size, "--burst-layout", "striped"]
    assert_equal(train(tmp_path, int(size), data, *HYBRID, *ours, *ring), hybrid_alone)


@pytest.mark.slow
@pytest.mark.proves("training runs", "under torchrun")
def test_under_torchrun(data, alone, tmp_path):
    script = Path(prepare_bytes.__file__).with_name("train_bytes_gpt.py")
    arguments = [*MODEL, *data, *CP2, *BURST, "--train-iters", "4", "--log-interval", "1"]
    done = torchrun(2, "-m", "burst_mcore.megatron", script, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "CPU support is on" in done.stderr
    losses = [float(loss) for loss in re.findall(r"lm loss: ([0-9.E+-]+)", done.stdout)]
    del losses[1]  # Megatron prints the mean of the first two there
    assert losses == pytest.approx([alone[i].loss for i in (0, 2, 3)], rel=1e-4)


@pytest.mark.proves("training runs", "killed and resumed")
def test_a_killed_rank_ends_the_run_with_a_message_and_the_checkpoint_resumes(data, tmp_path):
    saved = str(tmp_path / "saved")
    arguments = [*BURST, *CP2, "--save", saved, "--load", saved, "--save-interval", "4"]
    # All runs ask for the same number of iterations, on which the order of the samples depends.
    many = [*MODEL, *data, "--train-iters", "1000"]
    whole = forked_run(Job(tmp_path / "whole", 2, [*many, *BURST, *CP2, "--exit-interval", "20"]))
    found, started = [], []

    def start(**how):
        started.append(forked.start(**how))
        return started[-1]

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(JobFailedError, match=r"rank 0 was killed \(SIGKILL\)"),
    ):
        patch.setattr("job.start_processes", start)
        for iteration in Job(tmp_path, 2, [*many, *arguments]).run():
            found.append(iteration)
            if iteration.iteration == 5:  # the checkpoint of the fourth is complete
                os.kill(started[0].pids()[0], signal.SIGKILL)  # of ranks that both ended the first is told of
    last = int((tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text())
    assert 4 <= last <= 18
    resumed = forked_run(Job(tmp_path, 2, [*many, *arguments, "--exit-interval", "2"]))
    assert_equal([*found[:4], *resumed], [*whole[:4], *whole[last : last + 2]])


REFUSED = {
    "--attention-dropout 0.1": ([*BURST, "--attention-dropout", "0.1"], "attention dropout 0.1"),
    "--qk-clip in float32": ([*BURST, "--qk-clip"], "clip_qk takes a model in half precision"),
    "--qk-clip on shards": ([*BURST, "--qk-clip", "--bf16"], "--fp16, and drop --use-distributed-optimizer"),
    "FSDP": ([*BURST, "--use-megatron-fsdp"], "--use-megatron-fsdp needs CUDA"),
    "a spec and no burst attention": (
        [*"--context-parallel-attention-backend=default --spec burst_mcore.megatron.spec".split(), "x"],
        "--spec burst_mcore... is of burst attention: drop --context-parallel-attention-backend default",
    ),
    "--yaml-cfg": ([*BURST, "--yaml-cfg", "no.yaml"], "--yaml-cfg replaces the command line"),
}
"""Command lines that the launcher refuses, and one that test_checks.py refuses by a function call."""
BEFORE = re.compile(r"^[A-Z]\d{4} \d\d:|CPU support is on")
"""Lines of torch's log, and that of CPU support, which every run has."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_follows_from_arguments_is_one_line_on_each_rank_and_exit_status_2(name, data, tmp_path):
    arguments, words = REFUSED[name]
    script = Path(prepare_bytes.__file__).with_name("train_bytes_gpt.py")
    launched = ["-m", "burst_mcore.megatron", str(script)]
    command = [*launched, *MODEL, *data, *CP2, "--train-iters", "4", *arguments]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1"}
    shared |= {"PYTHONPATH": str(script.parents[1]), "MASTER_PORT": str(forked.free_port())}
    places = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    for rank, (status, errors) in enumerate(forked.ends(tmp_path, command, places)):
        assert status == 2, errors[-3000:]
        said = [line for line in errors.splitlines() if not BEFORE.search(line)]
        assert len(said) == 1 and words in said[0], said
        assert said[0].startswith(f"burst_mcore.megatron: {f'rank {rank}: ' if rank else ''}"), said


def test_a_script_is_also_found_by_its_modules_name(data, alone, tmp_path, monkeypatch):
    """A module of a package may import its neighbours, and Megatron's functions by name."""
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "mine" / "scripts"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package / "names.py").write_text("from megatron.training.arguments import validate_args\n")
    (package / "train.py").write_text(
        "import megatron.training.arguments, runpy\n"
        "from . import names\n"
        "assert names.validate_args is megatron.training.arguments.validate_args\n"
        "assert names.validate_args._burst_makers\n"
        "runpy.run_module('train_bytes_gpt', run_name='__main__')\n"
    )
    arguments = [*MODEL, *data, "--train-iters", "4", "--log-interval", "1", *BURST]
    well, printed, errors = forked.run(
        tmp_path, "-m", "burst_mcore.megatron", "-m", "mine.scripts.train", *arguments
    )
    assert well, errors[-3000:]
    losses = [float(loss) for loss in re.findall(r"lm loss: ([0-9.E+-]+)", printed)]
    assert losses[0] == pytest.approx(alone[0].loss, rel=1e-4)
    settings = dict(re.findall(r"^  burst_(\w+) \.+ (.*)$", printed, re.MULTILINE))
    assert settings["backward"] == "auto" and settings["overlap"] == "True" and "mesh" not in settings


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], "usage: python -m burst_mcore.megatron.*--burst-grad-dtype"),
        (["--help"], "^0$"),
        (["no.py"], "no such script: no.py; --help shows the usage$"),
        (["-m", "no.such.module"], "no such module: no.such.module; --help shows the usage$"),
    ],
)
def test_the_launcher_says_how_it_is_used(command, words, capsys):
    with pytest.raises(SystemExit, match=f"(?s){words}"):
        launcher.launch(command)
    assert ("usage: python -m burst_mcore.megatron" in capsys.readouterr().out) == (command == ["--help"])

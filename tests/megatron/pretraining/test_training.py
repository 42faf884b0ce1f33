"""Megatron's own trainer, started as a user would, on small models: from the flag to the checkpoint."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest

pytest.importorskip("megatron.training", reason="megatron.training comes with megatron-core from 0.19 on")
pytest.importorskip("tensorboard")

import forked
import limits
import megatron.core.tokenizers.text  # both here once, with what they import, for ranks that are forked
import megatron.training.training  # noqa: F401
import prepare_bytes  # it needs megatron.core
from job import Job, JobFailedError  # it needs tensorboard
from ranks import torchrun

import burst_mcore
from burst_mcore.megatron import core_attention, launcher

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 "
    "--lr 1e-2 --lr-decay-style constant --lr-decay-iters 100 --use-distributed-optimizer "
    "--override-opt-param-scheduler --seed 1 --split 100,0,0 --eval-iters 0 --eval-interval 1000 "
    "--num-workers 0 --calculate-per-token-loss --make-vocab-size-divisible-by 256"
).split()
BURST = ["--context-parallel-attention-backend", "burst"]
CP = {n: ["--context-parallel-size", str(n)] for n in (1, 2)}
CP1, CP2 = CP.values()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("data") / "text"
    texts = [b"the quick brown fox %d jumps over the lazy dog; " % i * 20 for i in range(20)]
    assert prepare_bytes.write(prefix, iter(texts))[0] == 20
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


@pytest.mark.proves("training runs", "CP 2 by the flag")
def test_a_ring_of_two_chosen_by_the_flag(data, alone, tmp_path):
    assert_equal(train(tmp_path, 2, data, *BURST, *CP2, "--burst-backward", "query"), alone)


@pytest.mark.slow
def test_ranks_in_interpreters_of_their_own(data, alone, tmp_path):
    """As the job starts them, where they are not forked from here."""
    assert_equal(list(Job(tmp_path, 1, [*MODEL, *data, "--train-iters", "4"]).run()), alone)


SPEC = ["--spec", "burst_mcore.megatron.spec", "burst_layer_spec"]


@pytest.mark.proves("training runs", "striped, block-striped")
@pytest.mark.parametrize(
    "arguments",
    [
        [*BURST, "--burst-layout", "striped"],
        pytest.param([*SPEC, "--burst-layout", "block-striped:16"], marks=pytest.mark.slow),
    ],
    ids=["striped by the flag", "block-striped by a spec"],
)
def test_layouts_that_megatron_does_not_shard(data, alone, tmp_path, arguments):
    assert_equal(train(tmp_path, 2, data, *CP2, *arguments), alone)


@pytest.fixture(scope="module")
def blends(data, tmp_path_factory):
    """Blends of two and of three data sets, by Megatron's weights, and one process that trains on each."""
    _, first, _, cache = data
    parts = ["0.5", first]
    found = {}
    for number, weight in ((2, "0.3"), (3, "0.2")):
        prefix = tmp_path_factory.mktemp("data") / f"part{number}"
        prepare_bytes.write(prefix, iter([b"%d red foxes; " % (i * number) * 40 for i in range(20)]))
        parts = [*parts, weight, str(prefix)]
        blend = ["--data-path", *parts, "--data-cache-path", cache]
        found[number] = blend, train(tmp_path_factory.mktemp("alone"), 1, blend)
    return found


SHARDED = [(2, 2, "zigzag"), (3, 2, "striped"), (3, 4, "zigzag"), (2, 4, "contiguous")]
SHARDED += [(3, 2, "stacked-zigzag:2"), (2, 4, "block-striped:8"), (3, 4, "striped")]


@pytest.mark.proves("training runs", "blends of 2 and 3 data sets at CP 2 and 4, on five layouts")
@pytest.mark.parametrize(
    ("sets", "size", "layout"),
    [*SHARDED[:2], *(pytest.param(*x, marks=pytest.mark.slow) for x in SHARDED[2:])],
)
def test_blends_of_data_sets(sets, size, layout, blends, alone, tmp_path):
    blend, one = blends[sets]
    ring = [*BURST, "--context-parallel-size", str(size), "--burst-layout", layout]
    assert_equal(train(tmp_path, size, blend, *ring), one)
    assert abs(one[-1].loss - alone[-1].loss) > 1e-3


@pytest.mark.proves("training runs", "windows in some layers")
@pytest.mark.slow
def test_windows_in_some_layers(data, alone, tmp_path):
    window = ["--window-size", "9,0", "--window-attn-skip-freq", "2"]
    one = train(tmp_path / "alone", 1, data, *window)
    assert_equal(train(tmp_path / "ring", 2, data, *BURST, *CP2, *window), one)
    assert abs(one[-1].loss - alone[-1].loss) > 1e-3


@pytest.mark.proves("training runs", "CP 2 by a spec")
def test_a_ring_of_two_chosen_by_a_spec(data, alone, tmp_path):
    assert_equal(train(tmp_path, 2, data, *SPEC, *CP2, "--burst-backward", "kv"), alone)


@pytest.mark.proves("training runs", "MLA whose latent rotates, compared with K and V")
@pytest.mark.slow
def test_the_latent_of_mla(data, tmp_path, monkeypatch):
    mla = ["--multi-latent-attention", "--kv-lora-rank", "16", "--qk-head-dim", "8", "--rope-type", "rope"]
    mla += ["--qk-pos-emb-head-dim", "8", "--v-head-dim", "8"]
    grouped = MODEL.index("--group-query-attention")  # and --num-query-groups 2
    monkeypatch.setattr("test_training.MODEL", [*MODEL[:grouped], *MODEL[grouped + 3 :]])
    call = [*BURST, *CP2, "--burst-backward", "kv", *mla]
    plain = train(tmp_path / "plain", 2, data, *call)
    with monkeypatch.context() as patch:
        patch.setattr(core_attention, "Latent", None)  # none is made without the flag
        assert_equal(train(tmp_path / "without", 2, data, *call, iterations=1), plain[:1])
        with pytest.raises(JobFailedError):
            train(tmp_path / "with", 2, data, *call, "--burst-mla-latent", "on", iterations=1)
    assert_equal(train(tmp_path / "latent", 2, data, *call, "--burst-mla-latent", "on"), plain)


@pytest.mark.proves("training runs", "fused loss")
def test_with_the_fused_loss(data, alone, tmp_path):
    assert_equal(train(tmp_path, 2, data, *BURST, *CP2, "--burst-fused-loss"), alone)


@pytest.mark.proves("training runs", "segment recompute")
def test_with_a_recompute_policy(data, alone, tmp_path):
    segment = ["--burst-recompute", "segment", "--burst-recompute-keep", "0.3"]
    assert_equal(train(tmp_path, 2, data, *BURST, *CP2, *segment), alone)
    errors = [log.read_text() for log in (tmp_path / "log").rglob("stderr.log")]
    assert len(errors) == 2
    for said in errors:  # it is in effect: on zigzag such a cut does not pay
        assert "segment recompute: keep=0.3 is moved to 0.5" in said


@pytest.mark.slow
def test_with_a_budget_of_memory_for_what_is_kept(data, alone, tmp_path):
    # O and LSE of one layer of a micro-batch of 2 take 2 * 32 * (4 * 8 + 4) * 4 bytes on a rank: half of two
    auto = ["--burst-recompute-keep", "auto", "--burst-recompute-memory-gb", "9.3e-6"]
    segment = ["--burst-recompute", "segment", *auto, "--burst-layout", "striped"]
    assert_equal(train(tmp_path, 2, data, *BURST, *CP2, *segment), alone)


@pytest.mark.slow
def test_with_a_recompute_policy_and_pipeline_parallelism(data, tmp_path):
    stages = ["--pipeline-model-parallel-size", "2", "--global-batch-size", "8", "--split", "50,50,0"]
    plain = train(tmp_path / "plain", 2, data, *stages)
    policy = ["--burst-recompute", "attention", "--eval-iters", "1", "--eval-interval", "2"]
    assert_equal(train(tmp_path / "policy", 4, data, *BURST, *CP2, *stages, *policy), plain)


@pytest.mark.proves("training runs", "TP 2 x CP 2, DP 2 x CP 2")
@pytest.mark.parametrize("other", [["--tensor-model-parallel-size", "2"], []], ids=["tensor", "data"])
def test_with_tensor_and_with_data_parallelism(data, alone, tmp_path, other):
    assert_equal(train(tmp_path, 4, data, *BURST, *CP2, *other), alone)


@pytest.mark.proves("training runs", "CP 4 on a double ring with shared heads")
def test_a_double_ring_that_shares_heads_chosen_by_flags(data, alone, tmp_path):
    nodes = ["--context-parallel-size", "4", "--hierarchical-context-parallel-sizes", "2", "2"]
    heads = ["--burst-head-parallel", "2", "--burst-backward", "query"]
    assert_equal(train(tmp_path, 4, data, *BURST, *nodes, *heads), alone)


def test_a_way_that_the_cost_model_chooses_by_the_given_rates(data, alone, tmp_path):
    auto = ["--burst-head-parallel", "auto", "--burst-ring", "auto", "--burst-rates", "1", "0.1", "0.01"]
    assert_equal(train(tmp_path, 2, data, *BURST, *CP2, *auto), alone)


@pytest.mark.proves("training runs", "PP 2 x CP 2")
def test_with_pipeline_parallelism(data, tmp_path):
    stages = ["--pipeline-model-parallel-size", "2"]  # its stages start from seeds of their own
    alone = train(tmp_path / "alone", 2, data, *stages)
    assert_equal(train(tmp_path / "ring", 4, data, *BURST, *CP2, *stages), alone)


@pytest.mark.proves("training runs", "EP 2 x CP 2")
def test_experts_behind_an_all_to_all(data, tmp_path):
    experts = ["--num-experts", "2", "--moe-router-topk", "1", "--moe-token-dispatcher-type", "alltoall"]
    experts += ["--moe-router-pre-softmax", "--expert-model-parallel-size", "2"]
    plain = train(tmp_path / "plain", 2, data, *experts)  # two data-parallel ranks, with an expert each
    assert_equal(train(tmp_path / "ring", 2, data, *BURST, *CP2, *experts), plain)


WHOLE_WEIGHTS = [word for word in MODEL if word != "--use-distributed-optimizer"]


@pytest.mark.proves("training runs", "qk-clip, in bfloat16")
def test_qk_clip(data, tmp_path):
    clip = ["--qk-clip", "--qk-clip-threshold", "1e-3", "--log-max-attention-logit", "--bf16"]
    plain, one, ring = (
        forked_run(
            Job(tmp_path / str(i), n, [*WHOLE_WEIGHTS, "--train-iters", "4", *data, *BURST, *CP[n], *words])
        )
        for i, (n, words) in enumerate([(1, ["--bf16"]), (1, clip), (2, clip)])
    )
    assert [i.loss for i in ring] == pytest.approx([i.loss for i in one], rel=2e-3)
    assert one[0].loss == plain[0].loss and one[-1].loss != pytest.approx(plain[-1].loss, rel=1e-4)


HYBRID = ["--hybrid-layer-pattern", "*-*-", "--num-layers", "4"]


@pytest.fixture(scope="module")
def hybrid_alone(data, tmp_path_factory):
    """A hybrid model, with Megatron's own attention, on one process."""
    stock = ["--spec", "stock_hybrid", "stack_spec"]
    return train(tmp_path_factory.mktemp("hybrid"), 1, data, *HYBRID, *stock)


@pytest.mark.proves("training runs", "HybridModel of attention and MLP layers, CP 2 and CP 4")
@pytest.mark.parametrize(
    ("size", "ours"),
    [("2", BURST), ("4", ["--spec", "burst_mcore.megatron.spec", "burst_hybrid_stack_spec"])],
)
def test_a_hybrid_model(size, ours, data, hybrid_alone, tmp_path):
    ring = ["--context-parallel-size", size, "--burst-layout", "striped"]
    assert_equal(train(tmp_path, int(size), data, *HYBRID, *ours, *ring), hybrid_alone)


LOCAL = {
    "experts": ["*-*E", "--num-experts", "2", "--moe-router-topk", "1", "--moe-router-pre-softmax"],
    "Mamba": ["M-*-"],
    "experts without their number": ["*-*E"],
}


@pytest.mark.proves("training runs", "HybridModel with experts, striped with the fused loss")
@pytest.mark.slow
def test_a_hybrid_model_with_experts(data, tmp_path):
    model = [*BURST, "--hybrid-layer-pattern", *LOCAL["experts"]]
    alone = train(tmp_path / "alone", 1, data, *model)
    ring = train(tmp_path / "ring", 2, data, *model, *CP2, "--burst-layout", "striped", "--burst-fused-loss")
    assert_equal(ring, alone)


@pytest.mark.parametrize("name", ["Mamba", "experts without their number"])
def test_layers_of_hybrid_models_that_have_no_local_modules(name, data, tmp_path):
    with pytest.raises(JobFailedError, match=r"has a layer .* lacks without TransformerEngine: Mamba \(M\)"):
        train(tmp_path, 1, data, *BURST, "--hybrid-layer-pattern", *LOCAL[name])


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


def _in_sessions(leaders):
    """Processes that run in the sessions of these ranks, whoever their parents are now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) in leaders and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.mark.proves("training runs", "killed and resumed")
def test_a_killed_rank_ends_the_run_with_a_message_and_the_checkpoint_resumes(data, tmp_path):
    saved = str(tmp_path / "saved")
    arguments = [*BURST, *CP2, "--save", saved, "--load", saved, "--save-interval", "4"]
    before = psutil.Process().children()  # of other tests: multiprocessing keeps servers
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
                leaders = set(started[0].pids().values())
                os.kill(started[0].pids()[0], signal.SIGKILL)  # of ranks that both ended the first is told of
    last = int((tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text())
    assert 4 <= last <= 18
    resumed = forked_run(Job(tmp_path, 2, [*many, *arguments, "--exit-interval", "2"]))
    assert_equal([*found[:4], *resumed], [*whole[:4], *whole[last : last + 2]])
    left = [p for p in psutil.Process().children() if p not in before]
    assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE]
    limits.until(lambda: not _in_sessions(leaders), "what the ranks had started did not end with them")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*BURST, "--burst-layout", "stripes"], "--burst-layout: unknown layout 'stripes'; legal: .*striped"),
        ([*BURST, "--burst-kernel", "flash9"], "unknown kernel 'flash9'.*aten-cpu"),
        (["--context-parallel-attention-backend", "ring"], "invalid choice: 'ring'.*default.*burst"),
        ([*BURST, "--burst-rates", "-1", "2", "3"], "--burst-rates: must be a positive number, got '-1'"),
    ],
)
def test_what_burst_cannot_do_stops_the_run_with_a_reason(data, tmp_path, arguments, words):
    with pytest.raises(JobFailedError, match=words):
        train(tmp_path, 2, data, *CP2, *arguments)


REFUSED = {
    "--attention-dropout 0.1": ([*BURST, "--attention-dropout", "0.1"], "attention dropout 0.1"),
    "--reset-attention-mask": ([*BURST, "--reset-attention-mask"], "--reset-attention-mask"),
    "a flag without the backend": (["--burst-ring", "flat"], "--burst-ring has no effect"),
    "--burst-recompute segment": ([*BURST, "--burst-recompute", "segment"], "--burst-recompute-keep F"),
    "--cp-comm-type": ([*BURST, "--cp-comm-type", "a2a", "--burst-ring", "flat"], "give one of them"),
    "documents between any tokens": (
        [*BURST, "--dataloader-inter-document-masking", "--mtp-num-layers", "1"],
        "is set: drop --dataloader-inter-document-masking",
    ),
    "--burst-kernel": ([*BURST, "--burst-kernel", "cudnn"], "--burst-kernel cudnn: tensors are on cpu"),
    "documents and stages": (
        [*BURST, *"--dataloader-inter-document-masking --pipeline-model-parallel-size 2".split(), *CP1],
        "pass --micro-batch-size 1 with --pipeline-model-parallel-size 2",
    ),
    "CP without burst attention": (
        [],
        "-size 2: Context parallelism is only supported by TEDotProductAttention: add --context-",
    ),
    "--qk-clip in float32": ([*BURST, "--qk-clip"], "clip_qk takes a model in half precision"),
    "--qk-clip on shards": (
        [*BURST, "--qk-clip", "--bf16"],
        "--fp16, and drop --use-distributed-optimizer",
    ),
    "FSDP": ([*BURST, "--use-megatron-fsdp"], "--use-megatron-fsdp needs CUDA"),
    "--cp-comm-type at CP 1": (
        [*BURST, *CP1, "--cp-comm-type", "ring"],
        "unknown --cp-comm-type ring; legal: ",
    ),
    "a spec and no burst attention": (
        [*"--context-parallel-attention-backend=default --spec burst_mcore.megatron.spec".split(), "x"],
        "--spec burst_mcore... is of burst attention: drop --context-parallel-attention-backend default",
    ),
    "--yaml-cfg": ([*BURST, "--yaml-cfg", "no.yaml"], "--yaml-cfg replaces the command line"),
}


BEFORE = re.compile(r"^[A-Z]\d{4} \d\d:|CPU support is on")
"""Lines of torch's log, and that of CPU support, which every run has."""


def _ends(folder, command, places):
    """(exit status, errors) of each rank, in interpreters of their own."""
    ended = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", *command],
            env={**os.environ, **place}, cwd=folder,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for place in places
    ]  # fmt: skip
    errors = [limits.told(process) for process in ended]
    return [(process.returncode, said) for process, said in zip(ended, errors, strict=True)]


LOGGED = "CP without burst attention"
"""Refused behind a log of torch's, so in interpreters of their own; others are forked."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == LOGGED)) for name in REFUSED]
)
def test_what_follows_from_arguments_is_one_line_on_each_rank_and_exit_status_2(name, data, tmp_path):
    arguments, words = REFUSED[name]
    script = Path(prepare_bytes.__file__).with_name("train_bytes_gpt.py")
    command = [
        "-m",
        "burst_mcore.megatron",
        str(script),
        *MODEL,
        *data,
        *CP2,
        "--train-iters",
        "4",
        *arguments,
    ]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1"}
    shared |= {"PYTHONPATH": str(script.parents[1]), "MASTER_PORT": str(forked.free_port())}
    places = [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    ends = _ends if name == LOGGED else forked.ends
    for rank, (status, errors) in enumerate(ends(tmp_path, command, places)):
        assert status == 2, errors[-3000:]
        said = [line for line in errors.splitlines() if not BEFORE.search(line)]
        assert len(said) == 1 and words in said[0], said
        assert said[0].startswith(f"burst_mcore.megatron: {f'rank {rank}: ' if rank else ''}"), said


ON_ONE_RANK = """
import os, runpy, sys
if os.environ["RANK"] == "0":
    sys.argv += "--context-parallel-attention-backend burst".split()
sys.argv[0] = "burst_mcore.megatron"
runpy.run_module("burst_mcore.megatron", run_name="__main__")
"""


@pytest.mark.slow
def test_a_rank_that_refuses_alone_tells_its_reason(data, tmp_path):
    """The flag is missing on rank 1: rank 0 goes on, until torchrun ends it."""
    (tmp_path / "on_one_rank.py").write_text(ON_ONE_RANK)
    script = Path(prepare_bytes.__file__).with_name("train_bytes_gpt.py")
    arguments = [*MODEL, *data, *CP2, "--train-iters", "4"]
    done = torchrun(2, tmp_path / "on_one_rank.py", script, *arguments, cwd=tmp_path)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if "burst_mcore.megatron: " in line]
    assert len(said) == 1 and re.search(r"rank 1: --context-parallel-size 2: .*add --context-", said[0]), said


@pytest.mark.slow
def test_torchrun_shows_the_refusal_of_rank_0(data, tmp_path):
    script = Path(prepare_bytes.__file__).with_name("train_bytes_gpt.py")
    arguments = [*MODEL, *data, *CP2, *BURST, "--train-iters", "4", "--attention-dropout", "0.1"]
    done = torchrun(2, "-m", "burst_mcore.megatron", script, *arguments, cwd=tmp_path)
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines() if line.startswith("burst_mcore.megatron: ")]
    assert len(ours) == 1 and "attention dropout 0.1" in ours[0], done.stderr[-3000:]
    assert re.search(r"rank +: 0 .*\n +exitcode +: 2", done.stderr), done.stderr[-3000:]
    package = f"{Path(burst_mcore.__file__).parent}/"
    assert done.stderr.count("Traceback") == 1 and package not in done.stderr  # torchrun's own


@pytest.mark.parametrize("name", ["train_bytes_gpt", "mine.scripts.train"])
def test_a_script_is_also_found_by_its_modules_name(name, data, alone, tmp_path, monkeypatch):
    """A module of a package may import its neighbours, and Megatron's functions by name."""
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "mine" / "scripts"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (package / "names.py").write_text(
        "from megatron.training.arguments import validate_args\n"
        "from megatron.training.training import get_model\n"
    )
    (package / "train.py").write_text(
        "import megatron.training.training\n"
        "from . import names\n"
        "assert names.get_model is megatron.training.training.get_model\n"
        "assert names.get_model._burst_makers and names.validate_args._burst_makers\n"
        "import runpy\n"
        "runpy.run_module('train_bytes_gpt', run_name='__main__')\n"
    )
    arguments = [*MODEL, *data, "--train-iters", "4", "--log-interval", "1", *BURST]
    well, printed, errors = forked.run(tmp_path, "-m", "burst_mcore.megatron", "-m", name, *arguments)
    assert well, errors[-3000:]
    losses = [float(loss) for loss in re.findall(r"lm loss: ([0-9.E+-]+)", printed)]
    assert losses[0] == pytest.approx(alone[0].loss, rel=1e-4)


@pytest.mark.proves("training runs", "`--cp-comm-type` p2p, a2a, all_gather, a list")
@pytest.mark.parametrize("kind", [["a2a"], ["all_gather"], ["p2p", "a2a"]], ids=" ".join)
def test_megatrons_own_comm_types(kind, data, alone, tmp_path):
    assert_equal(train(tmp_path, 2, data, *BURST, *CP2, "--cp-comm-type", *kind), alone)


@pytest.mark.proves("training runs", "`--cp-comm-type a2a+p2p`")
def test_megatrons_comm_type_of_two_levels(data, alone, tmp_path):
    levels = ["--cp-comm-type", "a2a+p2p", "--hierarchical-context-parallel-sizes", "2", "2"]
    assert_equal(train(tmp_path, 4, data, *BURST, "--context-parallel-size", "4", *levels), alone)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([], "usage: python -m burst_mcore.megatron.*--burst-grad-dtype"),
        (["no.py"], "no such script: no.py; --help shows the usage$"),
        (["-m", "no.such.module"], "no such module: no.such.module; --help shows the usage$"),
    ],
)
def test_the_launcher_says_how_it_is_used(command, words):
    with pytest.raises(SystemExit, match=f"(?s){words}"):
        launcher.launch(command)


def test_the_launchers_help_is_its_output(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        launcher.launch(["--help"])
    assert "usage: python -m burst_mcore.megatron" in capsys.readouterr().out


def test_functions_that_were_imported_by_name_before_are_wrapped_too():
    from burst_mcore.wrap import wrap_everywhere

    owner, before, twice = ModuleType("owner"), ModuleType("before"), ModuleType("twice")
    owner.answer = before.answer = before.same = twice.other = lambda: 1
    unrelated = before.unrelated = lambda: 1

    def doubled(function):
        return lambda: 2 * function()

    sys.modules |= {"owner": owner, "before": before, "twice": twice}
    try:
        for _ in range(2):
            wrap_everywhere(owner, "answer", doubled)
        assert [owner.answer(), before.answer(), before.same(), twice.other()] == [2, 2, 2, 2]
        assert before.unrelated is unrelated
    finally:
        for name in ("owner", "before", "twice"):
            del sys.modules[name]


def test_flags_that_are_given_are_kept():
    flags = ("--transformer-impl", "local", "--no-rope-fusion", "--distributed-backend", "gloo")
    given = ["script.py", "--transformer-impl=local", "--no-rope-fusion"]
    assert launcher._not_given(flags, given) == ["--distributed-backend", "gloo"]

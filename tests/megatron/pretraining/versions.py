"""Trains CP 2 beside CP 1 in whole trees of Megatron: by the launcher, and by patches without the launcher.

The functions serve tests/plan/test_patches.py. As a command, this file records a table of versions::

    PYTHONPATH=. python tests/megatron/pretraining/versions.py --out benchmarks/megatron-versions.json TREE...

Each TREE is a checkout of Megatron-LM, whose own pretrain_gpt.py is run on a copy.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tests/helpers"), str(ROOT / "examples")]

import forked  # noqa: E402
import limits  # noqa: E402
import prepare_bytes  # noqa: E402

from burst_plan import provenance  # noqa: E402
from burst_plan.patch import trees  # noqa: E402

INSTALLED = Path(importlib.util.find_spec("megatron.core").origin).parents[2]
TOLERANCE = 1e-4
"""Largest relative difference of losses and gradient norms that counts as equal, in float32."""

DOCUMENTS = "--dataloader-inter-document-masking"
STEPS, LAYERS, MICRO_BATCHES = 4, 2, 2
SMALL_MODEL = (
    f"--num-layers {LAYERS} --hidden-size 32 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 "
    "--lr 1e-2 --lr-decay-style constant --lr-decay-iters 100 --use-distributed-optimizer "
    "--override-opt-param-scheduler --seed 1 --split 100,0,0 --eval-iters 0 --eval-interval 1000 "
    "--num-workers 0 --calculate-per-token-loss --make-vocab-size-divisible-by 256"
).split()
MODEL = [*SMALL_MODEL, "--train-iters", str(STEPS), "--log-interval", "1"]
MODEL += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "257"]
CP2 = ["--context-parallel-size", "2"]
BURST = ["--context-parallel-attention-backend", "burst"]
MLA = (
    "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8 "
    "--rope-type rope"
).split()

IN_EFFECT = {
    trees.BACKEND: ("zigzag", 0, 0),
    trees.OPTIONS: ("striped", STEPS * LAYERS * MICRO_BATCHES, STEPS * MICRO_BATCHES),
}
OPTIONS = (
    "--burst-layout striped --burst-fused-loss --burst-recompute segment --burst-recompute-keep 0.3 "
    "--burst-backward query"
).split()

SCRIPT = """
import runpy, sys
from burst_mcore.attention import function as passes
from burst_mcore.megatron import cpu, fused_loss, layouts

def count(module, name):
    function, counts[name] = getattr(module, name), 0
    def counted(*args, **kwargs):
        counts[name] += 1
        return function(*args, **kwargs)
    setattr(module, name, counted)

counts = {}
count(passes, "forward_of_prefix")
count(fused_loss, "fused_linear_cross_entropy")
cpu.enable_training()
sys.argv += cpu.CPU_ARGUMENTS
script = sys.argv.pop(1)
sys.argv[0] = script
sys.path.insert(0, script.rsplit("/", 1)[0])
runpy.run_path(script, run_name="__main__")
assert "burst_mcore.megatron.launcher" not in sys.modules
print("in effect:", layouts._in_effect.layout, *counts.values())
"""


TEXTS = [b"the quick brown fox %d jumps over the lazy dog; " % i * 20 for i in range(20)]
SHORT_TEXTS = [text[:length] for text in TEXTS for length in (0, 0, 1, 2, 5, 17, 40, 90)]
"""Documents of 1 to 91 tokens: many of them end within a sample of 64."""


def write_data(folder, texts=TEXTS):
    """Write a small dataset, and return Megatron's flags for it."""
    folder.mkdir(exist_ok=True)
    prepare_bytes.write(folder / "text", iter(texts))
    return ["--data-path", str(folder / "text"), "--data-cache-path", str(folder / "cache")]


def whole_copy(source, target):
    """Copy a tree of Megatron: the package, the scripts at its root, and the installed compiled helpers."""
    shutil.copytree(source / "megatron", target / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    if (source / "pretrain_gpt.py").is_file():
        for path in source.glob("*.py"):
            shutil.copy(path, target)
    for path in (INSTALLED / "megatron/core/datasets").glob("helpers_cpp*.so"):
        shutil.copy(path, target / "megatron/core/datasets")
    return target


def _search_path():
    """Return the caller's PYTHONPATH, for packages that an old checkout imports."""
    return filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))


def start(tree, folder, ranks, arguments, by_launcher=False, script=None):
    """Run a training script on `ranks` processes.

    Returns the exit status, the standard output and the standard error of all ranks together.
    """
    runner = folder / "run.py"
    folder.mkdir(exist_ok=True)
    runner.write_text(SCRIPT)
    script = script or ROOT / "examples" / "train_bytes_gpt.py"
    launcher = ["-m", "burst_mcore.megatron"] if by_launcher else [str(runner)]
    command = [sys.executable, "-W", "ignore", *launcher, str(script), *arguments]
    place = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(forked.free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (tree, ROOT, ROOT / "examples", *_search_path()))),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    logs = [(folder / f"out{rank}", folder / f"errors{rank}") for rank in range(ranks)]
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=out.open("w"), stderr=errors.open("w"), cwd=folder,
        )
        for rank, (out, errors) in enumerate(logs)
    ]  # fmt: skip

    def ended():
        """Return whether all have ended well, or the first has not."""
        return all(p.poll() == 0 for p in processes) or any(p.poll() for p in processes)

    try:
        limits.until(ended, f"{script.name} on {ranks} ranks did not end")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    status = max(abs(process.returncode) for process in processes)
    return status, *("".join(log.read_text() for log in files) for files in zip(*logs, strict=True))


def losses(ended):
    """Read the losses and gradient norms of all steps from a run that ended well."""
    code, printed, errors = ended
    assert code == 0, errors[-3000:]
    steps = re.findall(r"lm loss: ([0-9.E+-]+).*?grad norm: ([0-9.]+)", printed)
    assert len(steps) == STEPS, printed[-2000:]
    return [float(number) for step in steps for number in step]


def in_effect(ended):
    """Read, rank by rank, the layout, the recomputed heads of the sequence, and the fused losses."""
    return [(name, int(n), int(m)) for name, n, m in re.findall(r"in effect: (\w+) (\d+) (\d+)", ended[1])]


def needed_on_cpu(tree):
    """Return the flags that a version needs without TransformerEngine."""
    return ["--cp-comm-type", "all_gather"] if "branch dev" in trees.SourceTree(tree).version else []


def row(way, arguments, ring, one):
    """Compare the losses and gradient norms of two runs."""
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses(ring), losses(one), strict=True))
    flags = " ".join(arguments)
    return {"way": way, "flags": flags, "worst relative difference": worst, "equal": worst < TOLERANCE}


def compared(source: Path, folder: Path) -> list[dict[str, object]]:
    """Train one process, then rings of two by the launcher and by each patch, in copies of a tree."""
    data = [*write_data(folder / "data"), *needed_on_cpu(source)]
    plain = whole_copy(source, folder / "plain")
    one = run(plain, 1, [*MODEL, *data], by_launcher=True)
    rows = []
    for way in ("launcher", trees.BACKEND, trees.OPTIONS):
        tree, by_launcher = plain, way == "launcher"
        if not by_launcher:
            tree = whole_copy(source, folder / way)
            trees.SourceTree(tree).apply(way)
        arguments = [*CP2, *BURST, *([] if way == trees.BACKEND else OPTIONS)]
        ring = run(tree, 2, [*MODEL, *data, *arguments], by_launcher)
        rows.append(row(way, arguments, ring, one))
        if not by_launcher:
            assert in_effect(ring) == [IN_EFFECT[way]] * 2
    if DOCUMENTS[2:].replace("-", "_") in (plain / "pretrain_gpt.py").read_text():  # dev's ignores the flag
        rows += compared_packed(folder)
    return rows


def compared_packed(folder: Path) -> list[dict[str, object]]:
    """Train on documents that end at any token, beside one process with Megatron's dense mask."""
    data = [*write_data(folder / "short", SHORT_TEXTS), *needed_on_cpu(folder / "plain")]
    reset = ["--reset-attention-mask", "--reset-position-ids"]
    one = run(folder / "plain", 1, [*MODEL, *data, *reset], by_launcher=True)
    rows = []
    rings = [(way, 2, []) for way in ("launcher", trees.BACKEND, trees.OPTIONS)]
    for way in ("launcher", trees.OPTIONS):  # the other patch has no flag for layouts
        rings += [(way, n, ["--burst-layout", layout]) for n, layout in ((4, "striped"), (2, "contiguous"))]
    for way, ranks, layout in rings:
        arguments = ["--context-parallel-size", str(ranks), *BURST, DOCUMENTS, *layout]
        tree = folder / ("plain" if way == "launcher" else way)
        ring = run(tree, ranks, [*MODEL, *data, *arguments], by_launcher=way == "launcher")
        rows.append(row(way, arguments, ring, one))
    return rows


def run(tree, ranks, arguments, by_launcher):
    """Run a checkout's own pretrain_gpt.py."""
    with tempfile.TemporaryDirectory() as folder:
        return start(tree, Path(folder), ranks, arguments, by_launcher, script=tree / "pretrain_gpt.py")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare each tree, write the file anew after each, and return 1 unless all are equal."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trees", nargs="+", type=Path, metavar="TREE", help="a checkout of Megatron-LM")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    chosen = parser.parse_args(arguments)
    rows: list[dict[str, object]] = []
    for source in chosen.trees:
        version = trees.SourceTree(source).version
        with tempfile.TemporaryDirectory() as folder:
            try:
                results = compared(source, Path(folder))
            except AssertionError as error:
                results = [{"way": "any", "equal": False, "error": str(error)[-500:]}]
        rows += [{"tree": source.name, "version": version, **row} for row in results]
        for row in rows[-len(results) :]:
            sys.stdout.write(f"{row}\n")
        about = f"{STEPS} steps of pretrain_gpt.py, CP 2 beside one process: losses and gradient norms"
        record = {"about": about, **provenance.made_by("cpu"), "rows": rows}
        chosen.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(not all(row["equal"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())

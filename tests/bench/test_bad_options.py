"""What `burst-mcore bench` refuses: in one line that says what is legal, with status 2, leaving no file."""

import json
import shlex

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from burst_bench.subjects import SUBJECTS
from burst_plan.cli import app

BAD = {
    "attention": [
        ("--methods ring9", "unknown method 'ring9'; legal: burst"),
        ("--case 'ranks=3; seq=64' --methods burst", "burst needs a sequence that is a multiple"),
        ("--case 'heads=6; kv_heads=4'", "kv_heads must divide heads"),
        ("--case dtype=int8", "float32"),
        ("--case seq=0", "seq must be at least 1"),
        ("--case seq=many", "seq must be int, got 'many'"),
        ("--case size=3", "unknown field 'size' in 'size=3'; legal: seq, heads"),
        ("--case '4 fish'", "unknown case '4 fish'; legal: 1 rank"),
        ("--case mask=star", "unknown mask 'star' in 'star'; legal: causal, full, window:W"),
        ("--case heads=6 --methods deepspeed-ulysses", "multiples of 4, got 6 and 6"),
        ("--out /proc/out.json", "cannot write /proc/out.json"),
        ("--device tpu", "no device 'tpu' here for attention; legal: auto, cpu"),
        ("--repeats 0", "--repeats must be at least 1, got 0"),
        ("--record no-list.json", "holds no list of rows"),
    ],
    "masks": [("--record rows.json", "--record writes rows of the subject attention")],
    "step": [
        ("--framework jax", "framework must be one of deepspeed, fsdp, megatron, got 'jax'"),
        ("--cluster 2x4", "unrecognized arguments: --cluster 2x4"),
        ("--case 'ranks=4; nodes=3'", "ranks must be a multiple of nodes, 3, got 4"),
        ("--case 'seq=100; ranks=8'", "seq must be a multiple of 2 x ranks, 16"),
        ("--case 'heads=6; kv_heads=4'", "heads must be a multiple of kv_heads, 4, got 6"),
        ("--methods 'te p2p' --framework deepspeed", "unknown method 'te p2p'; legal: ulysses"),
        ("--methods 'te p2p' --framework megatron", "a GPU and the package transformer-engine"),
        ("--case 'ranks=2; seq=64' --methods '+ double ring'", "needs 2 nodes or more: nodes=2"),
    ],
    "loss": [
        ("--case masked=1.0", "the masked share of tokens must be at least 0 and below 1, got 1.0"),
    ],
    "recompute": [
        ("--case seq=511", "seq must be a multiple of 2"),
        ("--case 'hidden=33; heads=2'", "heads must divide hidden"),
        ("--case layout=spiral", "unknown layout"),
    ],
    "tasks": [("", name) for name in SUBJECTS],
}
"""By subject: options, and words of the error."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no-list.json").write_text(json.dumps({}))
    return tmp_path


def refused(subject, options):
    """The line that says why, and that nothing else came of it."""
    done = CliRunner().invoke(app, ["bench", subject, *shlex.split(options)])
    assert done.exit_code == 2 and len(done.stderr.strip().splitlines()) == 1, (options, done.output)
    return done.stderr


@pytest.mark.parametrize("subject", BAD)
def test_bad_options_are_one_line_and_leave_nothing_behind(subject, folder):
    for options, words in BAD[subject]:
        assert words in refused(subject, options), options
        assert [file.name for file in folder.iterdir()] == ["no-list.json"], options


def test_who_starts_the_ranks_is_said(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("burst_bench.run.torch.cuda.is_available", lambda: True)
        assert "torchrun --nproc-per-node 8 -m burst_bench step" in refused("step", "--device cuda")
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert "topology starts its own processes: run it without torchrun" in refused("topology", "")

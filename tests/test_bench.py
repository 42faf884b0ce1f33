import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import processes

pytest.importorskip("typer")
pytest.importorskip("tabulate")

from typer.testing import CliRunner

from burst_mcore import Mask
from burst_mcore.bench import run, sparsity
from burst_mcore.bench.methods import METHODS, Method
from burst_mcore.cli import app
from burst_mcore.explain.problem import Problem

SMALL = Problem(seq=96, heads=6, kv_heads=3, head_dim=16)


MASKS = [
    "causal",
    "full",
    "causal & window:20",
    "dilated:40,3",
    "causal & documents:random,5",
    "blocks:8,0.3",
]


def _gates(rank, size):
    return {
        (name, mask): run._gate(rank, size, method, replace(SMALL, mask=mask), dist.group.WORLD)
        for name, method in METHODS.items()
        for mask in MASKS
        if method.needs(SMALL, size) is None
    }


@pytest.mark.parametrize("size", [1, 3])
def test_every_method_passes_its_gate_with_every_mask(size):
    for errors in processes(size, _gates):
        assert set(errors) == {(name, mask) for name in METHODS for mask in MASKS}
        assert all(0 < error <= 2 for error in errors.values())


def _wrong(rank, size):
    method = Method("wrong", "zigzag", lambda *_: None, lambda *_: lambda q, k, v: q * v.mean() + k)
    with pytest.raises(RuntimeError, match="wrong is wrong: its error is"):
        run._gate(rank, size, method, Problem(seq=96, heads=3, kv_heads=3, head_dim=16), dist.group.WORLD)


def test_a_wrong_method_is_not_timed():
    processes(2, _wrong)


def test_the_command_prints_a_table_and_one_json_line():
    result = CliRunner().invoke(
        app, "bench attention --ranks 2 --seq 128 --heads 2 --head-dim 16 --methods burst --repeats 1".split()
    )
    assert result.exit_code == 0, result.output
    *table, line = result.stdout.strip().splitlines()
    assert "CPU / bare kernel's" in "".join(table)
    found = json.loads(line)
    assert found["problem"]["seq"] == 128
    assert [(row["method"], row["ranks"]) for row in found["results"]] == [
        ("kernel", 1),
        ("burst", 1),
        ("burst", 2),
    ]
    assert all(row["cpu_seconds"] > 0 and row["error"] > 0 for row in found["results"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--methods ring9", "unknown method 'ring9'; legal: burst"),
        ("--ranks 3 --seq 64 --methods burst", "burst needs a sequence that is a multiple of 6, got 64"),
        ("--heads 6 --kv-heads 4", "kv_heads must divide heads"),
        ("--dtype int8", "float32"),
        ("--seq 0", "seq must be at least 1"),
        ("--mask star", "unknown mask 'star' in 'star'; legal: causal, full, window:W"),
        ("--mask window:64 --seq 16384", "over at most 8192 tokens, got 16384"),
        ("--ranks 4 --heads 6 --methods deepspeed-ulysses", "multiples of 4, got 6 and 6"),
    ],
)
def test_bad_options_are_one_line(options, words):
    result = CliRunner().invoke(app, ["bench", "attention", *options.split()])
    assert result.exit_code == 1
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_masked_problem_is_measured():
    words = "bench attention --ranks 2 --seq 256 --heads 2 --head-dim 16 --methods burst --repeats 1".split()
    result = CliRunner().invoke(app, [*words, "--mask", "causal & window:64"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.strip().splitlines()[-1])
    assert found["problem"]["mask"] == "causal & window:64"
    assert [row["method"] for row in found["results"]] == ["kernel", "burst", "burst"]


def test_a_shorter_problem_has_the_same_mask_in_proportion():
    problem = Problem(seq=2**16, heads=2, kv_heads=2, head_dim=16, mask="causal & window:4K")
    assert problem.shortened(512).seen == Mask.window(31, 0)


def test_the_problem_is_the_same_on_every_rank():
    assert all(torch.equal(x, y) for x, y in zip(SMALL.tensors(), SMALL.tensors(), strict=True))


def test_what_masks_save_is_measured_and_judged():
    problem = Problem(seq=256, heads=2, kv_heads=2, head_dim=16, mask="causal & documents:random,5")
    case = sparsity.Case("packed", problem, "auto", dense=1.0, per_pair=1e9)
    row = sparsity.measure(case, ranks=4, repeats=1)
    assert row.tokens == 256
    assert row.imbalance <= 1.05
    assert min(row.burst, row.of_tiles, row.times_faster, row.per_pair) > 0
    assert row.least_mb <= row.forward_mb <= row.all_gather_mb
    judged = list(sparsity.verdicts([(case, row)]))
    assert [v.reached for v in judged if "busiest" in v.claim or "per pair" in v.claim] == [True, True]
    assert "packed" in sparsity.report([row], judged)
    found = json.loads(sparsity.as_json([row], judged, ranks=4))
    assert found["rows"][0]["mask"] == "packed"
    assert len(found["verdicts"]) == len(judged) == 4
    assert not sparsity.Verdict("", 1.2, 1.1, at_most=True).reached
    assert not sparsity.Verdict("", 1.2, 1.8, at_most=False).reached


def test_the_cases_are_legal():
    for case in sparsity.cases(16384, 2):
        assert case.problem.seen.bands(case.problem.seq) is not None


def test_committed_results_say_the_commit_and_the_machine():
    folder = Path(__file__).parent.parent / "benchmarks" / "results"
    files = sorted(folder.glob("*.json"))
    assert files
    for file in files:
        results = json.loads(file.read_text())
        words = results["commit"]
        assert re.fullmatch("[0-9a-f]{12}", words) or re.search("committed with [0-9a-f]{7,}$", words), file
        assert "cores" in results["machine"], file

"""The runner of the bench: gates, clocks, results and the command, on attention and masks."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import limits
import pytest
import torch
from ranks import processes

pytest.importorskip("typer")

from typer.testing import CliRunner

from burst_bench import core, gate, report, stage
from burst_bench.core import METHODS, Bar, Method, Table, Trial, World, of_kind
from burst_bench.methods.attention import HIDDEN, RingCase, ShardedAttention, attended, share_of
from burst_bench.results import Results, read, unit_of
from burst_bench.run import run
from burst_bench.subjects import SUBJECTS, attention, masks
from burst_mcore import BurstConfig, Mask
from burst_mcore.attention.candidates import Question, Ranks
from burst_mcore.layout import Layout
from burst_plan.cli import app
from burst_plan.explain.problem import LayerProblem
from burst_plan.simulate.search import fastest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
SMALL = RingCase(seq=96, heads=6, kv_heads=3, head_dim=16)
MASKS = [
    "causal",
    "full",
    "causal & window:20",
    "dilated:40,3",
    "causal & documents:random,5",
    "blocks:8,0.3",
]


PAIRED = {"burst-auto-hidden", "double-ring", "usp"}
"""Methods that pair ranks, of four at least."""
ANY_MASK = {method.name for method in of_kind("attention") if method.ours} | {"deepspeed-ulysses"}
"""The others are those of tests/bench/test_peers.py."""


def _bench(*words):
    return CliRunner().invoke(app, ["bench", *words])


def _gates(rank, size):
    world = World(rank, size)
    found = {}
    for mask in MASKS:
        case = replace(SMALL, mask=mask, ranks=size, heads=2 * size, kv_heads=size)
        for name in ANY_MASK:
            method = METHODS["attention", name]
            if method.needs(case, "cpu") is None:
                found[name, mask] = gate.error(case, method.build(case, world), world)
    return found


@pytest.mark.parametrize(("size", "absent"), [(1, PAIRED), (3, PAIRED), (4, set())])
def test_every_method_passes_its_gate_with_every_mask(size, absent):
    for errors in processes(size, _gates):
        assert set(errors) == {(name, mask) for name in ANY_MASK - absent for mask in MASKS}
        assert all(0 < error <= gate.BOUND for error in errors.values())


def _wrong_attention(case, world):
    return ShardedAttention("zigzag", world, lambda q, k, v: q * v.mean() + k)


def _failing(case, world):
    raise RuntimeError("not on a Tuesday\nand more")


def test_a_wrong_method_is_not_timed_and_one_that_fails_is_no_others_fault(monkeypatch):
    for method in (Method("wrong", _wrong_attention), Method("fails", _failing)):
        monkeypatch.setitem(METHODS, ("attention", method.name), method)
    case = attention.AttentionCase(ranks=2, seq=96, heads=2, head_dim=16)
    results = run(SUBJECTS["attention"], {"small": case}, ["wrong", "fails", "burst"], 1, "cpu")
    reasons = {entry["method"]: entry["reason"] for entry in results.refused}
    assert re.fullmatch(r"wrong: its error is [\d.e+]+, which may be 2", reasons["wrong"])
    assert reasons["fails"] == "RuntimeError: not on a Tuesday"
    table = results.tables["small"]
    assert table["burst", "wall"][0] > 0 and table["wrong", "error"][0] > 2
    assert ("wrong", "wall") not in table
    assert [error["error"].split(":")[0] for error in results.errors] == ["wrong", "fails"]  # as if ours


def test_a_method_of_others_that_fails_is_a_result(monkeypatch, tmp_path):
    monkeypatch.setitem(METHODS, ("attention", "fails"), Method("fails", _failing, ours=False))
    case, out = "ranks=1; seq=96; heads=2; head_dim=16", tmp_path / "a.json"
    words = ["--case", case, "--repeats", "1", "--out", str(out), "--methods"]
    done = _bench("attention", *words, "fails,burst")
    assert done.exit_code == 0, done.output
    assert "fails was not timed: RuntimeError: not on a Tuesday" in done.stdout
    monkeypatch.setitem(METHODS, ("attention", "fails"), Method("fails", _failing))
    assert _bench("attention", *words, "fails,burst").exit_code == 1


def test_an_error_that_is_no_number_is_wrong():
    assert stage.wrong({"error": float("nan")}, 2.0) == "wrong: its error is nan, which may be 2"
    assert stage.wrong({"d_weight error": 0.2, "peak": 1e9}, 0.1).startswith("wrong: its d_weight error")
    assert stage.wrong({"error": 2.0, "peak": 1e9}, 2.0) is None


def test_the_command_prints_tables_and_writes_all_figures(tmp_path):
    out = tmp_path / "new" / "attention.json"
    words = ["--methods", "burst,ring", "--repeats", "2", "--out", str(out)]
    cases = [f"ranks={ranks}; seq=128; heads=2; head_dim=16; mask=causal & window:64" for ranks in (1, 2)]
    done = _bench("attention", *words, "--case", cases[0], "--case", cases[1])
    assert done.exit_code == 0, done.output
    assert "cpu / kernel" in done.stdout and str(out) in done.stdout
    results = read(out)
    assert [*results.cases] == cases and results.cases[cases[1]]["mask"] == "causal & window:64"
    for case in cases:
        table = results.tables[case]
        for name in ("burst", "ring", "kernel"):
            assert len(table[name, "cpu"]) == len(table[name, "wall"]) == 2 and min(table[name, "cpu"]) > 0
        assert 0 < table["burst", "error"][0] <= 2
        ratios = [a / b for a, b in zip(table["burst", "cpu"], table["kernel", "cpu"], strict=True)]
        assert table["burst", "cpu / kernel"] == pytest.approx(ratios)
    whole = json.loads(out.read_text())
    assert {"schema", "subject", "about", "commit", "machine", "versions", "device", "repeats"} <= set(whole)
    assert whole["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--methods", "ring9"], "unknown method 'ring9'; legal: burst"),
        (["--case", "ranks=3; seq=64", "--methods", "burst"], "burst needs a sequence that is a multiple"),
        (["--case", "heads=6; kv_heads=4"], "kv_heads must divide heads"),
        (["--case", "dtype=int8"], "float32"),
        (["--case", "seq=0"], "seq must be at least 1"),
        (["--case", "seq=many"], "seq must be int, got 'many'"),
        (["--case", "size=3"], "unknown field 'size' in 'size=3'; legal: seq, heads"),
        (["--case", "4 fish"], "unknown case '4 fish'; legal: 1 rank"),
        (["--case", "mask=star"], "unknown mask 'star' in 'star'; legal: causal, full, window:W"),
        (["--case", "heads=6", "--methods", "deepspeed-ulysses"], "multiples of 4, got 6 and 6"),
        (["--out", "/proc/out.json"], "cannot write /proc/out.json"),
        (["--device", "tpu"], "no device 'tpu' here for attention; legal: auto, cpu"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_bad_options_are_one_line(words, error):
    done = _bench("attention", *words)
    assert done.exit_code == 2
    assert error in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_subject_that_is_not_there_is_refused_with_all_that_are():
    done = _bench("tasks")
    assert done.exit_code == 2 and all(name in done.stderr for name in SUBJECTS)


def test_a_shorter_problem_has_the_same_mask_in_proportion():
    problem = LayerProblem(seq=2**16, heads=2, kv_heads=2, head_dim=16, mask="causal & window:4K")
    assert problem.shortened(512).seen == Mask.window(31, 0)
    assert gate.gate_problem(replace(SMALL, seq=2**16, mask="causal & window:4K"), 4).seen == Mask.window(
        31, 0
    )


def test_the_problem_is_the_same_on_every_rank():
    assert all(torch.equal(x, y) for x, y in zip(SMALL.tensors(), SMALL.tensors(), strict=True))


def test_what_masks_save_is_measured_and_judged(tmp_path):
    out = tmp_path / "masks.json"
    mask = "mask=causal & documents:random,5; layout=auto"
    case = f"seq=256; head_dim=16; ranks=4; {mask}; dense=1.0; per_pair=1e9"
    done = _bench("masks", "--case", case, "--repeats", "1", "--out", str(out))
    results = read(out)
    table = {key: samples[0] for key, samples in results.tables[case].items()}
    assert table["plan", "busiest / mean"] <= 1.05
    for meter in ("cpu", "cpu / tiles", "cpu / tiles, sharing", "masked dense / this", "cpu a pair / dense"):
        assert table["burst", meter] > 0
    assert table["plan", "least"] <= table["plan", "sent"] <= table["plan", "all-gather"]
    reached = {bar.claim: bar.reached for bar in results.bars}
    assert len(reached) == 4 and reached["busiest rank over mean"] and reached["per pair over dense kernel"]
    assert done.exit_code == (0 if all(reached.values()) else 1), done.output
    assert "busiest rank over mean" in done.stdout


def test_the_cases_are_legal():
    for case in masks.MaskCase.named("cpu").values():
        assert case.seen.bands(case.seq) is not None
    for subject in SUBJECTS.values():
        for device in subject.devices:
            cases = subject.named(device)
            assert cases and all(isinstance(case, subject) for case in cases.values())


def test_steps_are_timed_in_turn_forth_and_back():
    order = []

    def trial(name):
        return Trial({"": lambda: order.append(name)})

    trials = {name: trial(name) for name in ("first", "second")}
    samples = stage.interleave(trials, World(0, 1), 3, clearly=float("inf"))
    assert order == ["first", "second", "first", "second", "second", "first", "first", "second"]
    assert {key: len(values) for key, values in samples.items()} == {
        (name, meter): 3 for name in trials for meter in ("cpu", "wall")
    }


def test_what_is_clearly_slower_has_its_first_round_alone():
    seconds = iter([0.1, 1.0, 0.1, 0.1])
    calls = []

    def step(name):
        calls.append(name)
        return {"wall": next(seconds)}  # in the place of the clock's

    trials = {name: Trial({"": partial(step, name)}) for name in ("fast", "slow")}
    samples = stage.interleave(trials, World(0, 1), 2, clearly=1.5)
    assert calls == ["fast", "slow", "fast", "fast"]
    assert samples["slow", "wall"] == [1.0] and samples["fast", "wall"] == [0.1, 0.1]


def _says_who_it_is_and_waits(rank, size, folder):
    (Path(folder) / str(rank)).write_text(str(os.getpid()))
    time.sleep(2 * limits.SECONDS)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_ranks_end_with_a_benchmark_that_is_killed(tmp_path):
    start = "import test_bench; from burst_bench.launch import in_processes; "
    work = f"in_processes(2, test_bench._says_who_it_is_and_waits, {str(tmp_path)!r})"
    paths = os.pathsep.join([str(ROOT / "tests" / "bench"), str(ROOT / "tests" / "helpers"), str(ROOT)])
    first = subprocess.Popen([sys.executable, "-c", start + work], env={**os.environ, "PYTHONPATH": paths})

    def running():
        """Return the ranks that have begun and not ended."""
        begun = [int(file.read_text()) for file in tmp_path.iterdir() if file.read_text()]
        return [one for one in begun if Path(f"/proc/{one}/cmdline").exists()]

    try:
        limits.until(lambda: len(running()) == 2, "two ranks did not begin")
    finally:
        first.kill()
        first.wait()
    limits.until(lambda: not running(), "the ranks did not end with the benchmark")


def _over_ranks(rank, size):
    return stage.over_ranks({"cpu": 1.0 + rank, "wall": 1.0 + rank, "forward cpu": 2.0}, World(rank, size))


def test_cpu_seconds_of_ranks_are_summed_and_the_rest_is_the_slowest_ranks():
    assert processes(2, _over_ranks) == [{"cpu": 3.0, "wall": 2.0, "forward cpu": 4.0}] * 2


def test_auto_is_held_to_the_cpu_seconds_of_the_ring_on_one_node_and_where_bytes_are_hidden():
    names = ("ring", "burst-auto", "burst-auto-hidden")
    case = attention.AttentionCase(ranks=4, seq=256, heads=4, head_dim=16)
    results = run(SUBJECTS["attention"], {"a": case}, names, 1, "cpu")
    assert not results.refused and not results.errors
    table = results.tables["a"]
    want = {name: table[name, "cpu"][0] / table["ring", "cpu"][0] for name in names}
    assert {(bar.method, bar.bound, bar.value) for bar in results.bars} == {
        (name, 1.02, want[name]) for name in names[1:]
    }
    assert case.bars("cuda") == replace(case, ranks=1).bars("cpu") == ()


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_rates_that_hide_messages_leave_nothing_exposed(kv_heads):
    shape = share_of(4096, 8, kv_heads, 64)
    question = Question(shape, Layout("zigzag"), Mask.causal(), 4 * 4096, Ranks(4, 2), HIDDEN)
    way = fastest(BurstConfig(head_parallel="auto"), question)
    assert way.compute_seconds > 0.99 * way.seconds


class Judged(attention.AttentionCase):
    overall = (Bar("all", "burst", "cpu", 1.0),)

    def bars(self, device):
        return [Bar("low", "burst", "cpu", 2.0), Bar("high", "burst", "cpu", 2.0, at_most=False)]


def test_bars_judge_medians_and_a_missing_figure_is_told():
    tables = {"a": Table({("burst", "cpu"): (1.0, 9.0, 1.5)})}
    fields = {"heads": 4, "dtype": "float32", "of": []}
    results = Results("attention", "", "cpu", 3, {"a": fields}, tables)
    results.judge(Judged, {"a": Judged()})
    assert [(bar.claim, bar.value, bar.reached) for bar in results.bars] == [
        ("low", 1.5, True),
        ("high", 1.5, False),
    ]
    assert results.not_judged == ["all cases: all"]
    text = report.report(results)
    assert text.startswith("a\nheads=4; dtype=float32\n|       |")
    assert "MISSED" in text and "not judged, since not measured: all cases: all" in text
    meters = ("cpu", "products wall", "cpu / tiles", "peak", "backward TFLOP/s", "error")
    assert [unit_of(meter) for meter in meters] == ["s", "s", "x", "B", "TFLOP/s", ""]


def test_a_file_is_read_as_it_was_written(tmp_path):
    tables = {"a": Table({("b", "cpu"): (1.0, 2.0)})}
    results = Results("masks", "about", "cpu", 3, {"a": {"seq": 8}}, tables)
    results.notes.append("a note")
    (tmp_path / "a.json").write_text(results.as_json())
    assert read(tmp_path / "a.json") == results
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(ValueError, match="not a file of `burst-mcore bench`, schema 1"):
        read(tmp_path / "b.json")


def test_words_make_the_fields_that_a_case_has():
    case = core.in_words(masks.MaskCase, "seq=128K; heads=4; mask=causal & window:64; dense=1.5; layout=auto")
    assert (case.seq, case.heads, case.kv_heads, case.dense) == (2**17, 4, 4, 1.5)
    assert isinstance(case.sharded, Layout)


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_committed_results_say_the_commit_the_machine_and_bars_that_follow(file):
    whole, results = json.loads(file.read_text()), read(file)
    commit = whole["commit"]
    assert re.fullmatch("[0-9a-f]{12}", commit) or re.search("committed with [0-9a-f]{7,}$", commit)
    assert "cores" in whole["machine"] and isinstance(whole["versions"], dict)
    subject = SUBJECTS[results.subject]
    cases = {name: subject(**fields) for name, fields in results.cases.items()}
    recorded, open_ = results.bars, results.not_judged
    results.judge(subject, cases)
    assert (results.bars, results.not_judged) == (recorded, open_)
    assert recorded or not any(case.bars(results.device) for case in cases.values())
    assert [bar["reached"] for bar in whole["bars"]] == [bar.reached for bar in recorded]
    for refused in results.refused:  # what was not timed has no times
        table = results.tables[refused["case"]]
        assert not {(refused["method"], meter) for meter in ("cpu", "wall")} & table.keys(), refused


BUILD = """

def _mine(case: RingCase, world: World) -> Attention:
    return burst(case, world, backward="kv")


add("attention", Method("mine", _mine, divisible))
"""


def test_a_method_is_added_by_the_files_that_the_page_names(tmp_path):
    page = (ROOT / "docs" / "evidence" / "architecture.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| a bench method |"))
    named = re.findall(r"`([\w/]+\.py)`", row.split("|")[2])
    assert named == ["burst_bench/methods/attention.py"]
    for package in ("burst_mcore", "burst_plan", "burst_bench"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / named[0]).open("a") as file:
        file.write(BUILD)
    for subject, case in (
        ("attention", "ranks=2; seq=64; heads=2; head_dim=8"),
        ("masks", "seq=64; head_dim=8"),
    ):
        out = tmp_path / f"{subject}.json"
        words = ["--case", case, "--methods", "mine", "--repeats", "1", "--out", str(out)]
        command = [sys.executable, "-W", "ignore", "-m", "burst_bench", subject, *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=_environment(tmp_path), capture_output=True, text=True
        )
        assert read(out).tables[case]["mine", "cpu"], done.stdout + done.stderr


def _environment(folder):
    import os

    return {**os.environ, "PYTHONPATH": str(folder)}


def test_the_attended_output_alone_is_what_a_method_returns():
    from burst_mcore import Topology

    q, k, v, _ = SMALL.tensors()
    assert attended(q, k, v, topology=Topology.single(), mask=Mask.causal()).shape == q.shape


@pytest.mark.parametrize("old", ["", ".check", ".report"])
def test_old_names_run_the_bench_for_one_release(old):
    said = [
        limits.run([sys.executable, "-m", f"{name}{old}", "--help"])
        for name in ("burst_bench", "burst_mcore.bench")
    ]
    assert said[0].stdout == said[1].stdout and "usage" in said[0].stdout.lower()

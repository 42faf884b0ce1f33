"""The cost model beside public measurements: rows, fits, errors and regret, and the command `plan`."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import processes, torchrun
from sources import Paper, public_rows
from typer.testing import CliRunner

from burst_bench.calibrate import Line, measured
from burst_bench.core import World
from burst_bench.published.against import (
    by_machine,
    calibrated,
    compare,
    descend,
    error,
    fitted_machine,
    loss_of,
)
from burst_bench.published.methods import FITTED, WAYS, seconds_of, way_of
from burst_bench.published.rows import Row
from burst_bench.published.training import of_row
from burst_mcore import Layout, Mask
from burst_mcore.attention.candidates import Question, Ranks, Settings, kernel_seconds
from burst_mcore.attention.geometry.shard import Shard
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.rates import CPU, RATES_FILE, Rates, default_rates
from burst_plan.cli import app
from burst_plan.machines import CONSTANTS, MACHINES, machine, machine_of
from burst_plan.simulate.search import candidates
from burst_plan.words import in_words

PUBLIC = Path(__file__).parents[3] / "benchmarks" / "public"
PAPER = Path(__file__).parents[4] / "shared" / "paper"
ROW = {
    **{"hardware": "H100", "gpus": 8, "gpus_per_node": 8, "heads": 64, "kv_heads": 8, "head_dim": 128},
    **{"batch": 1, "seq": 65536, "mask": "causal", "passes": "fwd", "method": "ulysses", "tflops": 600.0},
}


def _rows(*names):
    return [Row.of(row) for name in names for row in json.loads((PUBLIC / f"{name}.json").read_text())]


def _row(**changes):
    return Row.of({**ROW, **changes})


def _report():
    return compare([PUBLIC / "magi.json", PUBLIC / "usp.json"], [PUBLIC / "calibration.json"])


def test_rows_that_were_not_used_for_calibration_are_predicted():
    report = _report()
    modelled = [one for one in report.compared if one.row.method in WAYS and not one.row.varlen]
    assert len(modelled) == 341 and all(one.predicted is not None for one in modelled)
    assert report.median < 0.10
    for name in ("H100", "B200"):
        errors = sorted(abs(one.error) for one in report.judged if one.row.hardware == name)
        assert errors[int(0.9 * len(errors))] < 0.10, name
    groups = [one for one in report.regret if one["group"].startswith(("H100", "B200"))]
    assert len(groups) == 12 and all(one["regret"] < 0.05 for one in groups)


def test_presets_are_what_the_calibration_rows_give():
    for name, found in calibrated(_rows("calibration")).items():
        for number in found.fitted:
            assert getattr(found, number) == pytest.approx(getattr(MACHINES[name], number), rel=0.1), name


def _fitted_constants(rows):
    """The constant of all machines (`Constants.loops`) and the machines, fitted in turn; rows count alike."""
    known, constants = by_machine(rows), FITTED
    machines = {name: MACHINES[name] for name in known}
    for _ in range(2):
        machines = {name: fitted_machine(machines[name], own, constants) for name, own in known.items()}

        def loss(values, machines=machines):
            tried = replace(FITTED, **values)
            return sum(len(own) * loss_of(own, machines[name], tried) for name, own in known.items())

        constants = replace(constants, **descend({"call": float(constants.call)}, [("call",)], loss))
    return constants, machines


@pytest.mark.slow  # minutes: machines and constants are fitted six times
def test_the_constant_of_all_machines_does_not_hang_on_one_of_them():
    rows, used = _rows("magi", "usp"), set(_rows("calibration"))
    held = by_machine(row for row in rows if row not in used)

    def median(constants, machines, without):
        errors = sorted(
            abs(math.expm1(error(row, machines[name], constants)))
            for name, own in held.items()
            if name != without
            for row in own
        )
        return errors[len(errors) // 2]

    constants, machines = _fitted_constants(used)
    assert constants.call == pytest.approx(CONSTANTS.loops, rel=0.05)
    for without in held:
        others, refitted = _fitted_constants(row for row in used if row.hardware != without)
        refitted = {**machines, **refitted}
        assert abs(median(others, refitted, without) - median(constants, machines, without)) < 0.03, without


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's figures lie beside the repository")
def test_the_file_of_the_papers_rows_has_the_papers_results():
    made = public_rows(Paper(PAPER / "results.json"))
    assert made == json.loads((PUBLIC / "paper.json").read_text())
    assert [*map(of_row, made[14:])] == [*map(of_row, Paper(PAPER / "results.json").steps())]


def test_one_command_prints_the_table_of_the_paper_that_the_manual_shows():
    """Attention and steps are in one file; errors are those of the page, by table of the paper."""
    done = CliRunner().invoke(app, ["plan", "--against", str(PUBLIC / "paper.json")])
    assert done.exit_code == 0, done.output
    page = (PUBLIC.parents[1] / "docs" / "evidence" / "planner.md").read_text()
    rows = re.findall(r"^(BurstEngine, .*?)  +(\w.*?)  +(\d+)  +(\S+%)  +(\S+%)  +(\S+%)$", done.output, re.M)
    assert len(rows) == 12 and sum(int(row[2]) for row in rows) == 72
    for row in rows:
        assert f"| {' | '.join(row)} |" in page


def test_a_file_to_calibrate_needs_rows_of_attention(tmp_path):
    rows = json.loads((PUBLIC / "paper.json").read_text())
    files = [tmp_path / name for name in ("all.json", "steps.json")]
    for file, part in zip(files, (rows, rows[14:]), strict=True):
        file.write_text(json.dumps(part))
    assert compare([PUBLIC / "paper.json"], files[:1]).machines.keys() == {"A800"}
    with pytest.raises(ValueError, match="has no rows of attention"):
        compare([PUBLIC / "paper.json"], files[1:])


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's figures lie beside the repository")
def test_the_papers_rows_of_attention_are_predicted(tmp_path):
    files = [tmp_path / f"{name}.json" for name in ("results", "calibration")]
    for file in files:
        file.write_text(json.dumps([*Paper(PAPER / file.name).attention()]))
    report = compare(files[:1], files[1:])
    assert len(report.judged) == 11 and sum(abs(one.error) <= 0.15 for one in report.judged) == 10


def test_the_last_line_is_the_report_as_json(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([ROW, {**ROW, "method": "ring", "tflops": 420.0, "note": "kept"}]))
    done = CliRunner().invoke(app, ["plan", "--against", str(file)])
    assert done.exit_code == 0, done.output
    report = json.loads(done.output.splitlines()[-1])
    ulysses, ring = report["rows"]
    assert {**ROW, "measured": 600.0, "predicted": ulysses["predicted"]} == ulysses
    assert ring["note"] == "kept" and 0.5 < ring["predicted"] / 420 < 2
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in report["rows"]]
    assert report["median_error"] == pytest.approx(sum(errors) / 2)
    (regret,) = report["regret"]
    assert regret["measured_best"] == "ulysses" and regret["chosen"] in ("ulysses", "ring")


def test_a_null_is_a_field_that_is_not_there():
    assert Row.of({**ROW, "variant": None, "head_parallel": None, "iterations_per_second": None}) == _row()
    with pytest.raises(ValueError, match="has no gpus"):
        Row.of({**ROW, "gpus": None})


def test_rows_of_other_units_clusters_or_dtypes_are_no_alternatives(tmp_path):
    others = ({"tflops": None, "iterations_per_second": 9.0}, {"gpus_per_node": 4}, {"dtype": "float16"})
    file = tmp_path / "rows.json"
    for changes, groups in ((others[0], 0), (others[1], 0), (others[2], 0), ({}, 1)):
        file.write_text(json.dumps([ROW, {**ROW, "method": "ring", **changes}]))
        assert len(compare([file]).regret) == groups, changes


def test_rows_that_no_schedule_runs_say_why(tmp_path):
    rows = [
        {**ROW, "method": "magi-native"},
        {**ROW, "method": "my-own"},
        {**ROW, "mask": "varlen_full"},
        {**ROW, "method": "usp", "head_parallel": 3},
        {**ROW, "method": "usp", "gpus": 12, "gpus_per_node": 4, "head_parallel": 6},
    ]
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows))
    report = compare([file]).as_json()
    assert all(row["predicted"] is None and row["why"] for row in report["rows"])
    assert report["median_error"] is None and report["regret"] == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpus": None}, "row 0: has no gpus"),
        ({"gpus": 0}, "gpus must be a positive integer"),
        ({"mask": "banded"}, "mask must be one of causal, full"),
        ({"hardware": "Z80"}, "unknown machine 'Z80': one of A100-NVLink"),
        ({"tflops": None}, "one figure of tflops and iterations_per_second"),
        ({"tflops": -1.0}, "tflops must be a positive number"),
        ({"tflops": "fast"}, "tflops must be a positive number"),
        ({"kv_heads": 7}, "kv_heads must divide heads"),
        ({"gpus": 12}, "12 gpus do not go evenly on nodes of 8"),
        ({"passes": "sideways"}, "passes must be one of fwd, bwd"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16"),
        ({"method": "usp", "head_parallel": "8"}, "head_parallel must be a positive integer, got '8'"),
        ({"method": "usp", "head_parallel": 0}, "head_parallel must be a positive integer, got 0"),
        ({"passes": None, "mask": None}, "row 0: has no mask, passes"),
        ({"variant": ["zigzag"]}, "variant must be words, got ['zigzag']"),
        ({"hardware": ["H100"]}, "hardware must be words"),
    ],
)
def test_bad_rows_are_one_line_and_status_2(change, words, tmp_path):
    row = {name: value for name, value in {**ROW, **change}.items() if value is not None}
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([row]))
    done = CliRunner().invoke(app, ["plan", "--against", str(file)])
    assert done.exit_code == 2
    assert words in done.output and len(done.output.splitlines()) == 1


@pytest.mark.parametrize("text", ["", "7", "{}", "[1]", '{"attention_tflops_8gpu_7b_heads": {"seq": [1]}}'])
def test_files_of_another_form_are_one_line_and_status_2(text, tmp_path):
    file = tmp_path / "rows.json"
    file.write_text(text)
    for args in (["--against", str(file)], ["--against", str(tmp_path / "none.json")]):
        done = CliRunner().invoke(app, ["plan", *args])
        assert done.exit_code == 2 and len(done.output.splitlines()) == 1, done.output


def test_a_plan_without_rows_is_one_line_and_status_2(tmp_path):
    for args in ([], ["--calibrate", str(tmp_path / "rows.json")]):
        done = CliRunner().invoke(app, ["plan", *args])
        assert done.exit_code == 2 and done.output.startswith("burst-mcore plan: give --model MODEL")
        assert len(done.output.splitlines()) == 1


@pytest.mark.parametrize("method", WAYS)
@pytest.mark.parametrize("passes", ["fwd", "bwd", "fwd+bwd"])
@pytest.mark.parametrize("hardware", MACHINES)
def test_every_method_is_slower_than_its_kernel_alone(method, passes, hardware):
    row = _row(method=method, passes=passes, hardware=hardware, gpus=16, seq=16 * 4096)
    way, rates = way_of(row), MACHINES[hardware].rates
    if isinstance(way, str):
        assert method == "ulysses" or "head_parallel" in way
        return
    free = replace(
        rates,
        fill=0.0,
        wave=0.0,
        wave_backward=0.0,
        call=0.0,
        memory=math.inf,
        slowdown=0.0,
        latency=0.0,
        intra=1e30,
        inter=1e30,
    )
    assert seconds_of(row, way, rates) > seconds_of(row, way, free) > 0
    peak = MACHINES[hardware].tflops
    assert row.figure_of(seconds_of(row, way, rates)) < peak


def test_time_of_a_call_grows_with_its_tile():
    shard = Shard(batch=1, tokens=8, heads=1, kv_heads=1, head_dim=1, value_dim=1, dtype=torch.float32)
    rates = Rates(intra=1.0, inter=1.0, compute=4.0, fill=10.0)  # 4 FLOPs a pair
    pairs = torch.tensor([0.0, 8.0, 32.0, 200.0], dtype=torch.float64)
    seconds = kernel_seconds(shard, Pass.FORWARD, rates, pairs)
    assert seconds.tolist() == [0.0, 8 + 40, 32 + 80, 200 + 80]
    plain = kernel_seconds(shard, Pass.FORWARD, replace(rates, fill=0.0), pairs)
    assert plain.tolist() == [0.0, 8.0, 32.0, 200.0]


def test_small_tiles_are_slow_and_backward_has_a_rate_of_its_own():
    shard = Shard(batch=1, tokens=1024, heads=8, kv_heads=8, head_dim=64, value_dim=64, dtype=torch.bfloat16)
    rates = Rates(
        intra=1e9, inter=1e9, compute=1e12, backward=5e11, fill=100.0, exponentials=1e12, memory=1e12
    )
    pairs = torch.tensor([1024.0 * 1024], dtype=torch.float64)
    forward, plain = (
        kernel_seconds(shard, Pass.FORWARD, each, pairs) for each in (rates, replace(rates, fill=0))
    )
    assert float(forward) > 1.09 * float(plain)
    backward = float(kernel_seconds(shard, Pass.KV, replace(rates, fill=0.0, memory=1e30), pairs))
    flops = 2 * 8 * (3 * 64 + 2 * 64)
    assert backward == pytest.approx(float(pairs) * (flops / 5e11 + 8 / 1e12))


def _candidates(rates, *, kv_heads=8, degrees=(1, 2, 4, 8)):
    shard = Shard(
        batch=1, tokens=4096, heads=32, kv_heads=kv_heads, head_dim=128, value_dim=128, dtype=torch.bfloat16
    )
    return candidates(
        Question(shard, Layout("zigzag"), Mask.causal(), 8 * 4096, Ranks(8, 8), rates),
        Settings(overlap=True, rings=("flat",), degrees=degrees, directions=(Pass.KV,)),
    )


def test_crowding_and_slower_levels_cost_exchanges_and_hops():
    base = Rates(intra=1e10, inter=1e10, compute=1e14)
    crowded = replace(base, crowding=1.0)
    ways = dict(zip((1, 2, 4, 8), zip(_candidates(base), _candidates(crowded), strict=True), strict=True))
    for degree, (plain, slow) in ways.items():
        assert (slow.seconds > 1.01 * plain.seconds) == (degree > 2), degree
    sockets = replace(base, levels=((4, 1e9),))
    for plain, slow in zip(_candidates(base), _candidates(sockets), strict=True):
        assert slow.seconds > plain.seconds and slow.intra_bytes == plain.intra_bytes
    busy = replace(base, others=0.5)
    for plain, slow in zip(_candidates(base), _candidates(busy), strict=True):
        assert slow.seconds > plain.seconds


def test_pcie_is_no_reason_to_share_all_heads():
    """Measured on 8 L20: a ring of 4 with heads over 2 is 4 times as fast as heads over 8."""
    rates = MACHINES["L20-PCIe"].rates
    seconds = {c.route.heads: c.forward_seconds for c in _candidates(rates, kv_heads=8)}
    assert seconds[8] > 2 * seconds[2]


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-NVLink"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe"),
        ("NVIDIA A800-SXM4-80GB", "A800"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA L20", "L20-PCIe"),
        ("NVIDIA GeForce RTX 5090", None),
    ],
)
def test_a_gpu_is_known_by_its_name(gpu, name):
    assert machine_of(gpu) == name


def test_machines_are_named_in_any_case_and_others_refused():
    assert machine("a100") is MACHINES["A100-NVLink"] and machine("l20-pcie") is MACHINES["L20-PCIe"]
    with pytest.raises(ValueError, match="unknown machine 'tpu': one of A100-NVLink"):
        machine("tpu")


def test_a_file_of_rates_replaces_the_presets(tmp_path, monkeypatch):
    rates = replace(MACHINES["H100"].rates, levels=((2, 1e9),), hidden=False)
    rates.save(tmp_path / "rates.json", machine="mine")
    assert Rates.load(tmp_path / "rates.json") == rates
    default_rates.cache_clear()
    assert default_rates("cpu") == CPU
    default_rates.cache_clear()
    monkeypatch.setenv(RATES_FILE, str(tmp_path / "rates.json"))
    try:
        assert default_rates("cpu") == rates
    finally:
        default_rates.cache_clear()
    (tmp_path / "rates.json").write_text('{"rates": {"intra": 1}}')
    with pytest.raises(ValueError, match="is no file of rates"):
        Rates.load(tmp_path / "rates.json")


def test_explain_takes_a_machine_or_a_file_not_both(tmp_path):
    MACHINES["H100"].rates.save(tmp_path / "rates.json")
    asked = ["explain", "--heads", "8", "--seq", "64K"]
    named = CliRunner().invoke(app, [*asked, "--cluster", "h100:1x4"])
    by_file = CliRunner().invoke(app, [*asked, "--cluster", "1x4", "--rates", str(tmp_path / "rates.json")])
    assert named.exit_code == by_file.exit_code == 0 and named.output == by_file.output
    both = CliRunner().invoke(app, [*asked, "--cluster", "h100:1x4", "--rates", str(tmp_path / "rates.json")])
    assert both.exit_code == 2 and "give one of them" in both.output
    unknown = CliRunner().invoke(app, [*asked, "--cluster", "z80:1x4"])
    assert unknown.exit_code == 2 and "unknown machine 'z80'" in unknown.output


def test_this_machine_is_measured_into_a_file_that_explain_takes(tmp_path):
    file = tmp_path / "rates.json"
    done = CliRunner().invoke(app, ["calibrate", "--ranks", "3", "--repeats", "1", "--out", str(file)])
    assert done.exit_code == 0, done.output
    rates = Rates.load(file)
    assert 1e8 < rates.compute < 1e13 and 1e8 < rates.memory < 1e13 and not rates.hidden
    assert 1e6 < rates.intra < 1e11 and 0 <= rates.latency < 1 and rates.inter < rates.intra
    assert {"commit", "machine", "versions"} <= set(json.loads(file.read_text()))
    explained = CliRunner().invoke(app, ["explain", "--heads", "4", "--cluster", "1x2", "--rates", str(file)])
    assert explained.exit_code == 0 and in_words(rates) in explained.output


def _nodes(rank, size, node):
    return measured(World(rank, size), node, 1)


def test_links_between_nodes_are_measured_apart():
    """Four processes pose as two nodes of two, and as four nodes of one; their links are all the same."""
    for node in (2, 1):
        rates = processes(4, _nodes, node)
        assert all(one == rates[0] for one in rates[1:])
        assert rates[0].inter != rates[0].intra * CPU.inter / CPU.intra or node == 1
        assert 0 < rates[0].inter <= rates[0].intra and rates[0].crowding == 0.0


def test_torchrun_starts_the_ranks_that_are_measured(tmp_path):
    file = tmp_path / "rates.json"
    calibrate = "-m burst_plan.cli calibrate --repeats 1 --out".split()
    done = torchrun(2, *calibrate, file, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "measured with 2 ranks" in done.stdout and "not measured: links between machines" in done.stdout
    assert Rates.load(file).compute > 1e8


@pytest.mark.parametrize(
    "args",
    [
        ["--ranks", "1"],
        ["--repeats", "0"],
        ["--out", "/nowhere/rates.json"],
        ["--device", "cuda"],
        ["--device", "tpu"],
    ],
    ids=" ".join,
)
def test_calibrate_refuses_in_one_line(args):
    done = CliRunner().invoke(app, ["calibrate", *args])
    assert done.exit_code == 2 and len(done.output.splitlines()) == 1, done.output


def test_a_line_has_no_negative_numbers():
    assert Line.through((1.0, 5.0), (3.0, 9.0)) == Line(3.0, 2.0)
    assert Line.through((1.0, 1.0), (3.0, 9.0)).start == 0.0
    assert Line.through((1.0, 9.0), (4.0, 6.0)) == Line(0.0, 1.5)  # a busy machine: the larger one counts

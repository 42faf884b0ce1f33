"""The cost model beside public measurements: rows, fits, errors and regret, and the command `plan`."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from burst_bench.published.against import (
    compare,
)
from burst_bench.published.methods import METHODS
from burst_mcore.rates import CPU, RATES_FILE, Rates, default_rates
from burst_plan.cli import app
from burst_plan.machines import MACHINES
from burst_plan.words import in_words

PUBLIC = Path(__file__).parents[2] / "benchmarks" / "public"
ROW = {
    **{"hardware": "H100", "gpus": 8, "gpus_per_node": 8, "heads": 64, "kv_heads": 8, "head_dim": 128},
    **{"batch": 1, "seq": 65536, "mask": "causal", "passes": "fwd", "method": "ulysses", "tflops": 600.0},
}


@pytest.fixture(scope="module")
def report():
    return compare([PUBLIC / "magi.json", PUBLIC / "usp.json"], [PUBLIC / "calibration.json"])


def test_rows_that_were_not_used_for_calibration_are_predicted(report):
    modelled = [one for one in report.compared if one.row.method in METHODS and not one.row.varlen]
    assert len(modelled) == 341 and all(one.predicted is not None for one in modelled)
    assert report.median < 0.10
    for name in ("H100", "B200"):
        errors = sorted(abs(one.error) for one in report.judged if one.row.hardware == name)
        assert errors[int(0.9 * len(errors))] < 0.10, name
    groups = [one for one in report.regret if one["group"].startswith(("H100", "B200"))]
    assert len(groups) == 12 and all(one["regret"] < 0.05 for one in groups)


def test_presets_are_what_the_calibration_rows_give(report):
    assert len(report.machines) > 2
    for name, found in report.machines.items():
        for number in found.fitted:
            assert getattr(found, number) == pytest.approx(getattr(MACHINES[name], number), rel=0.1), name


def test_one_command_prints_the_table_of_the_paper_that_the_manual_shows():
    """Attention and steps are in one file; errors are those of the page, by table of the paper."""
    done = CliRunner().invoke(app, ["plan", "--against", str(PUBLIC / "paper.json")])
    assert done.exit_code == 0, done.output
    page = (PUBLIC.parents[1] / "docs" / "evidence" / "planner.md").read_text()
    rows = re.findall(r"^(BurstEngine, .*?)  +(\w.*?)  +(\d+)  +(\S+%)  +(\S+%)  +(\S+%)$", done.output, re.M)
    assert len(rows) == 12 and sum(int(row[2]) for row in rows) == 72
    for row in rows:
        assert f"| {' | '.join(row)} |" in page


BAD_ROWS = [
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
]
BAD_FILES = "", "7", "{}", "[1]", "[]", '{"attention_tflops_8gpu_7b_heads": {"seq": [1]}}'


def test_bad_rows_and_files_are_one_line_and_status_2(tmp_path):
    file, given = tmp_path / "rows.json", [(text, "rows.json") for text in BAD_FILES]
    for change, words in BAD_ROWS:
        row = {name: value for name, value in {**ROW, **change}.items() if value is not None}
        given.append((json.dumps([row]), words))
    for text, words in given:
        file.write_text(text)
        done = CliRunner().invoke(app, ["plan", "--against", str(file)])
        assert done.exit_code == 2 and words in done.output, (text, done.output)
        assert len(done.output.splitlines()) == 1, done.output
    done = CliRunner().invoke(app, ["plan", "--against", str(tmp_path / "none.json")])
    assert done.exit_code == 2 and len(done.output.splitlines()) == 1, done.output


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
    with pytest.raises(ValueError, match="Rates.inter must be a positive number"):
        Rates(intra=1, inter=float("nan"), compute=1)


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

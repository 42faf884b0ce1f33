"""Training steps that others published: what their engines do, and predictions beside their figures."""

import json
from pathlib import Path

import pytest
from step_errors import judged, ranges, table

from burst_bench.published.against import compare
from burst_bench.published.training import figure, of_row, predicted
from burst_plan.machines import MACHINES
from burst_plan.step.figures import TABLE, errors_of

ROOT = Path(__file__).parents[2]
PUBLIC = ROOT / "benchmarks" / "public"


def test_the_errors_that_are_told_are_those_of_todays_model():
    """The committed table is what `make tables` writes, and a range holds its every run."""
    assert (ROOT / "burst_plan" / "step" / TABLE).read_text() == table(PUBLIC)
    rows = judged(PUBLIC)
    for errors in ranges(rows):
        own = [one for one in rows if one.kind == errors.kind]
        assert len({one.measurement for one in own}) == errors.runs >= 1
        assert all(errors.low - 1e-3 < one.error < errors.high + 1e-3 for one in own)
        assert errors_of(own[0].run.plan, own[0].run.model) == errors
    read = json.loads((PUBLIC / "training.json").read_text())
    assert len(rows) == len(read) and all("@" in row["source"] or "/" in row["source"] for row in read)


def test_readmes_errors_of_memory_are_those_of_todays_model():
    rows = [row for row in json.loads((PUBLIC / "paper.json").read_text()) if row.get("metric") == "mem_gb"]
    told = [(row["value"], figure(of_row(row), "mem_gb", MACHINES)) for row in rows]
    errors = sorted(size / value - 1 for value, size in told if value and not isinstance(size, str))
    near, others = [x for x in errors if abs(x) < 0.095], [x for x in errors if abs(x) >= 0.095]
    low, lowest = -100 * max(others), -100 * min(others)
    words = (
        f"{len(near)} of {len(errors)} public rows within 9 %, the others {low:.0f} to {lowest:.0f} % too low"
    )
    assert words in (ROOT / "README.md").read_text()


def _chart_row(**changes):
    """A row of DeepSpeed's chart, of its Ulysses on four A100s."""
    rows = json.loads((PUBLIC / "training.json").read_text())
    row = next(row for row in rows if row["plan"].get("cp") == 4 and "of_source" in row)
    return {**row, **changes}


def test_rows_that_no_run_describes_have_a_reason(tmp_path):
    row = _chart_row(seq=2**18, value=50.0)
    for changes, words in (
        ({"method": "a new method"}, "unknown method a new method"),
        ({"hardware": "TPU"}, "unknown hardware TPU"),
    ):
        assert of_row({**row, **changes}) == words
    for changes, words in (
        ({"mask": "window:4"}, "mask of a row of training must be causal or full, got 'window:4'"),
        ({"value": "7"}, "must be a positive number, or null, got '7'"),
        ({"model": {**row["model"], "mixer": {}}}, "mixer in the model of a row of training: rows of hybrid"),
    ):
        with pytest.raises(ValueError, match=words):
            of_row({**row, **changes})
    for lacking in ("plan", "model", "seq", "gpus", "metric", "value"):
        with pytest.raises(ValueError, match=f"lacks a field: KeyError '{lacking}'"):
            of_row({name: value for name, value in row.items() if name != lacking})
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([row, {**row, "method": "", "value": None}]))
    report = compare([file])
    assert [one.why for one in report.compared] == [None, None] and len(report.judged) == 1
    assert "4 A100-quad, 262144, " in report.compared[0].words


def test_fpdt_fits_where_ulysses_does_not():
    ulysses = _chart_row(seq=2**20)
    fpdt = {**ulysses, "plan": {**ulysses["plan"], "chunked": True, "tiled": True, "fused_loss": True}}
    assert [predicted(of_row(row)).fits for row in (fpdt, ulysses)] == [True, False]


def test_the_papers_steps_are_predicted():
    report = compare([PUBLIC / "paper.json"])
    assert "of 22 figures of runs that failed 14 are predicted so" in report.sentence

    def named(rows, beginning):
        return [one for one in rows if one.entries.get("name", "").startswith(beginning)]

    megatron = named(report.compared, "end_to_end/megatron")
    assert len(megatron) == 8 and all(one.why.startswith("out of memory") for one in megatron)
    bars = {"tokens per second per GPU": 0.08, "mem_gb": 0.10}
    for beginning, count, beyond in (("ablation", 12, 1), ("inter_node", 6, 0), ("end_to_end/burst", 20, 0)):
        own = named(report.judged, beginning)
        missed = [one.words for one in own if abs(one.error) > bars[one.entries["metric"]]]
        assert len(own) == count and len(missed) <= beyond, missed

"""Training steps that others published: what their engines do, and predictions beside figures of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sources import Paper, fitted, row_of_words
from step_errors import judged, ranges, table

from burst_bench.published.against import compare
from burst_bench.published.training import of_row, predicted
from burst_mcore.attention.candidates import Ranks, kernel_seconds
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.rates import CPU
from burst_plan.machines import CONSTANTS, MACHINES
from burst_plan.step import figures
from burst_plan.step.attention import AttentionTime
from burst_plan.step.figures import TABLE, errors_of, kind_of
from burst_plan.step.memory import shard_of, stack, states
from burst_plan.step.model import PRESETS
from burst_plan.step.search import least
from burst_plan.step.time import PAGEABLE, PREFETCH, times
from burst_plan.step.way import Way

ROOT = Path(__file__).parents[3]
PUBLIC = ROOT / "benchmarks" / "public"
SHARED = ROOT.parent / "shared"
SLOW = replace(MACHINES["A100-quad"], nic=0.01).rates
"""Networks whose messages take far longer than all compute."""
RUNS = AttentionTime(forward=0.01, backward=0.02, kernel=0.03)
FULL = Way(framework="megatron-deepspeed", zero=3, cp=4, recompute="full", fused_loss=False)


def _times(model, way, ranks, rates=MACHINES["A100-NVLink"].rates, seq=2**16):
    return times(PRESETS[model], way, seq, ranks, rates, 312e12, RUNS, again=1.0)


def test_the_errors_that_are_told_are_those_of_todays_model():
    """The committed table is what `make tables` writes, and a range holds its every run."""
    assert (ROOT / "burst_plan" / "step" / TABLE).read_text() == table(PUBLIC)
    rows = judged(PUBLIC)
    for errors in ranges(rows):
        own = [one for one in rows if one.kind == errors.kind]
        assert len({one.measurement for one in own}) == errors.runs >= 1
        assert all(errors.low - 1e-3 < one.error < errors.high + 1e-3 for one in own)
        assert errors_of(own[0].run.way, own[0].run.model) == errors
    read = json.loads((PUBLIC / "training.json").read_text())
    assert len(rows) == len(read) and all("@" in row["source"] or "/" in row["source"] for row in read)


def test_rows_that_differ_in_an_assumption_are_one_run():
    rows = [one for one in judged(PUBLIC) if one.run.model.name == "llama3-405b"]
    assert [one.run.way.recompute for one in rows] == ["none", "full"]
    (errors,) = ranges(rows)
    assert errors.runs == 1 and errors.low < errors.high and errors.kind == "TP or PP"
    assert str(errors).startswith("predicted; on 1 public run of this kind (TP or PP) predictions were ")


@pytest.mark.parametrize(
    ("degrees", "model", "kind"),
    [
        ({}, "7b", "one GPU"),
        ({"dp": 8, "zero": 3}, "7b", "dense FSDP"),
        ({"cp": 2, "dp": 4}, "7b", "long context"),
        ({"tp": 2, "cp": 4}, "7b", "TP or PP"),
        ({"pp": 2}, "7b", "TP or PP"),
        ({"ep": 8, "dp": 8, "tp": 2}, "experts", "experts"),
        ({"cp": 8}, "experts", "experts"),
    ],
)
def test_the_kind_of_a_way_follows_from_its_degrees(degrees, model, kind):
    sparse = replace(PRESETS["7b"], experts=8, active=2, expert_ffn=1024)
    assert kind_of(Way(**degrees), sparse if model == "experts" else PRESETS[model]) == kind


def test_a_kind_without_public_runs_says_so(monkeypatch):
    monkeypatch.setattr(figures, "_table", dict)
    errors = errors_of(Way(cp=2), PRESETS["7b"])
    assert str(errors) == "predicted; no public run of this kind (long context) was compared"
    assert errors.range == "unknown"


def test_a_collective_over_nodes_passes_all_shares_but_one_between_them():
    way = Way(framework="bmtrain", zero=3, dp=8)
    exposed = _times("7b", way, Ranks(8, 4), SLOW, 2**13).exposed["weights gathered"]
    size = 2 * PRESETS["7b"].parameters * 7 / 8
    assert exposed == pytest.approx(2 * size / (4 * SLOW.link(inter=True)), rel=0.05)


def test_sequence_parallelism_gathers_once_more_in_backward():
    model, way = PRESETS["gpt-13b"], Way(tp=8, recompute="full")
    exposed = _times("gpt-13b", way, Ranks(8, 4), SLOW).exposed["tensor parallel"]
    once = 2 * 2**16 * model.hidden * 7 / 8 / (4 * SLOW.link(inter=True))
    # Around attention and an MLP: a gather and a scatter in three passes, and one gather more.
    assert exposed == pytest.approx(model.layers * 2 * (3 * 2 + 1) * once, rel=0.01)


def test_deepspeed_gathers_little_ahead_where_layers_are_large():
    small, large = (
        _times(model, FULL, Ranks(4, 2), replace(SLOW, inter=1e10), seq=2**20).exposed["weights gathered"]
        for model in ("gpt-2.7b", "gpt-30b")
    )
    seconds = 2 * 2 * PRESETS["gpt-30b"].parameters * 3 / 4 / 2e10
    layer = 12 * PRESETS["gpt-30b"].hidden ** 2
    assert large == pytest.approx(seconds * (1 - 4 * PREFETCH / layer), rel=0.05)
    assert small < 0.1 * seconds


@pytest.mark.parametrize("way", [FULL, replace(FULL, framework="deepspeed"), Way(cp=4, zero=1)])
def test_gradients_are_reduced_in_float32_where_ranks_share_a_sequence(way):
    exposed = _times("7b", way, Ranks(4, 2), SLOW).exposed["gradients reduced"]
    numbers = PRESETS["7b"].parameters * 3 / 4 / (2 * SLOW.link(inter=True))
    gathers = 0 if way.zero == 3 else 2  # the first stage gathers weights behind the optimizer
    assert exposed == pytest.approx((4 + gathers) * numbers, rel=0.05)
    alone = replace(way, cp=1, dp=4, framework="deepspeed")
    assert _times("7b", alone, Ranks(4, 2), SLOW).exposed["gradients reduced"] < exposed


def test_inputs_of_layers_on_the_host_cost_a_wait_and_no_memory():
    model, host = PRESETS["7b"], replace(FULL, offload_inputs=True)
    waits = _times("7b", host, Ranks(4, 4)).exposed["activations offloaded"]
    inputs = 2 * 2**14 * model.hidden * model.layers
    assert waits == pytest.approx(2 * inputs / (CONSTANTS.host_link * PAGEABLE))
    kept, gone = (stack(model, way, 2**20)["inputs of layers"] for way in (FULL, host))
    assert kept / gone == model.layers / 2


def test_a_tiled_mlp_keeps_nothing_and_computes_its_first_product_again():
    tiled = replace(FULL, tiled=True)
    once, more = (_times("gpt-13b", way, Ranks(4, 4)).compute["mlp"] for way in (FULL, tiled))
    assert more / once == pytest.approx((4 + 1 / 2) / 4)
    assert "MLP" in stack(PRESETS["gpt-13b"], replace(FULL, recompute="none"), 2**20)
    assert "MLP" not in stack(PRESETS["gpt-13b"], replace(tiled, recompute="none"), 2**20)


def test_chunks_of_attention_on_the_host_take_as_much_memory_at_any_length():
    sizes = [stack(PRESETS["7b"], replace(FULL, chunked=True, tiled=True, fused_loss=True), n, heads=4)
             for n in (2**19, 2**21)]  # fmt: skip
    assert sizes[0]["exchanged heads"] == sizes[1]["exchanged heads"]
    assert sizes[0]["attention"] == sizes[1]["attention"]


def test_ranks_that_share_all_heads_have_no_ring():
    ring, heads = (stack(PRESETS["7b"], FULL, 2**19, heads=heads) for heads in (1, 4))
    assert "ring buffers" in ring and "exchanged heads" not in ring
    assert "ring buffers" not in heads and "exchanged heads" in heads
    assert least(PRESETS["7b"], FULL, 2**19) == heads


def test_gradients_wait_on_the_host_with_deepspeeds_optimizer():
    found = states(PRESETS["7b"], replace(FULL, offload_optimizer=True))
    assert found["gradients"] == found["optimizer"] == 0 < found["weights"]


def test_a_kernel_computes_the_next_head_dim_that_it_has():
    shard = shard_of(PRESETS["gpt-2.7b"], FULL, 2**16)

    def per_pair(dim, rates):
        rates = replace(rates, fill=0.0, wave=0.0, memory=1e30)
        of_dim = replace(shard, head_dim=dim, value_dim=dim)
        return float(kernel_seconds(of_dim, Pass.FORWARD, rates, torch.ones(1, dtype=torch.float64)))

    assert per_pair(64, SLOW) < per_pair(80, SLOW) == per_pair(96, SLOW) < per_pair(128, SLOW)
    assert per_pair(80, CPU) < per_pair(96, CPU)  # where none are named, a kernel has every head dim


def _row(method="", **more):
    return {
        "pass": "train",
        "model": {"name": "Llama3-8B"},
        "gpus": 4,
        "seq": 2**18,
        "method": method,
        "hardware": "A100",
        "source": "a chart",
        "metric": "MFU",
        "value": 50.0,
        **more,
    }


def test_rows_that_no_run_describes_have_a_reason(tmp_path):
    row = row_of_words(_row("FPDT"))
    assert of_row({**row, "method": "a new method"}) == "unknown method a new method"
    assert of_row({**row, "hardware": "TPU"}) == "unknown hardware TPU"
    with pytest.raises(ValueError, match="mask of a row of training must be causal or full, got 'window:4'"):
        of_row({**row, "mask": "window:4"})
    with pytest.raises(ValueError, match="must be a positive number, or null, got '7'"):
        of_row({**row, "value": "7"})
    with pytest.raises(
        ValueError, match="mixer in the model of a row of training: rows of hybrid models are"
    ):
        of_row({**row, "model": {**row["model"], "mixer": {}}})
    for lacking in ("way", "model", "seq", "gpus", "metric", "value"):
        with pytest.raises(ValueError, match=f"lacks a field: KeyError '{lacking}'"):
            of_row({name: value for name, value in row.items() if name != lacking})
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([row, {**row, "method": "", "value": None}]))
    report = compare([file])
    assert [one.why for one in report.compared] == [None, None] and len(report.judged) == 1
    assert "4 A100-quad, 262144, " in report.compared[0].words


def test_fpdt_fits_where_ulysses_does_not():
    rows = [row_of_words(_row(method, seq=2**20)) for method in ("FPDT", "DeepSpeed Ulysses")]
    assert [predicted(of_row(row)).fits for row in rows] == [True, False]


def test_committed_rows_say_what_the_words_of_their_sources_mean():
    rows = [row for row in json.loads((PUBLIC / "training.json").read_text()) if "of_source" in row]
    assert len(rows) == 54
    for row in rows:
        words = row["of_source"]
        model = {"name": words["model"]}
        meant = row_of_words(
            {**row, "hardware": words["hardware"], "method": words["method"], "model": model}
        )
        assert of_row(row) == of_row(meant) and (row["value"], row["metric"]) == (
            meant["value"],
            meant["metric"],
        )


def _written(tmp_path, rows):
    """A file of rows."""
    file = tmp_path / f"{len([*tmp_path.iterdir()])}.json"
    file.write_text(json.dumps([*rows]))
    return file


@pytest.mark.skipif(not SHARED.exists(), reason="published figures lie beside the repository")
def test_the_papers_steps_are_predicted(tmp_path):
    whole, used = (Paper(SHARED / "paper" / f"{name}.json") for name in ("results", "calibration"))
    steps = [row for row in whole.steps() if row not in [*used.steps()]]
    report = compare([_written(tmp_path, steps)], [_written(tmp_path, used.attention())])
    ablation = [one for one in report.judged if one.entries["name"].startswith("ablation")]
    bars = {"tokens per second per GPU": 0.08, "mem_gb": 0.10}
    assert len(ablation) == 10
    assert sum(abs(one.error) <= bars[one.entries["metric"]] for one in ablation) >= 9
    nodes = [one for one in report.judged if one.entries["name"].startswith("inter_node")]
    assert len(nodes) == 6 and all(abs(one.error) <= bars[one.entries["metric"]] for one in nodes)
    burst = [one for one in report.judged if one.entries["name"].startswith("end_to_end/burst")]
    assert len(burst) == 20 and all(abs(one.error) <= 0.15 for one in burst)
    megatron = [one for one in report.compared if "end_to_end/megatron" in one.entries["name"]]
    assert len(megatron) == 8 and all(one.why.startswith("out of memory") for one in megatron)
    assert "of 22 figures of runs that failed 14 are predicted so" in report.sentence


@pytest.fixture(scope="module")
def evidence(tmp_path_factory):
    """The report on rows of other engines, and that on the two rows that are fitted."""
    read = json.loads((SHARED / "evidence/training.json").read_text())
    rows = [row_of_words(row) for row in read]
    assert len(rows) == 111 and rows.count("products in 8 bits are not modelled") == 20
    rows = [row for row in rows if not isinstance(row, str)]
    folder = tmp_path_factory.mktemp("evidence")
    return [
        compare([_written(folder, [row for row in rows if fitted(row) == which])]) for which in (False, True)
    ]


@pytest.mark.skipif(not SHARED.exists(), reason="published figures lie beside the repository")
def test_published_steps_are_predicted_or_have_a_reason(evidence):
    report, _ = evidence
    assert len(report.compared) == 89 and len(report.judged) == 88
    assert all(one.predicted is not None or one.why for one in report.compared)
    assert report.median <= 0.15
    assert report.within(0.9) < 0.45  # steps of few tokens are predicted too fast
    wrong = [one.words for one in report.compared if (one.why or "").startswith("out of memory")]
    assert len(wrong) == 1 and "llama3-8b on 4" in wrong[0]


@pytest.mark.skipif(not SHARED.exists(), reason="published figures lie beside the repository")
def test_two_rows_of_deepspeeds_chart_are_fitted_and_not_judged(evidence):
    _, report = evidence
    assert len(report.compared) == 2 and all(abs(one.error) < 0.03 for one in report.compared)


@pytest.mark.skipif(not SHARED.exists(), reason="published figures lie beside the repository")
@pytest.mark.parametrize("method", ["DeepSpeed Ulysses", "FPDT (Ulysses-Offload)"])
def test_long_sequences_of_deepspeed_are_predicted_within_a_tenth(method, evidence):
    report, _ = evidence
    of_method = [one for one in report.judged if one.entries["of_source"]["method"] == method]
    long = [one for one in of_method if one.entries["seq"] >= 2**19]
    assert len(long) >= 3 and sum(abs(one.error) <= 0.1 for one in long) >= 0.8 * len(long)

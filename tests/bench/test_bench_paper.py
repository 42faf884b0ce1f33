"""The paper's comparison, emulated: programs played by processes, and the predictions beside them."""

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from ranks import processes
from typer.testing import CliRunner

from burst_bench import emulate
from burst_bench.core import Table, World, of_kind
from burst_bench.methods.played import Scale, exchange, play
from burst_bench.results import read
from burst_bench.run import run
from burst_bench.subjects import paper
from burst_bench.subjects.paper import PaperCase
from burst_mcore.attention.schedule.actions import Compute, Link, Send
from burst_mcore.attention.schedule.route import Route, Schedule
from burst_plan.cli import app
from burst_plan.simulate.play import play as simulated

NAMED = {method.name: method for method in of_kind("played")}
CELL = PaperCase(cluster="2x4", tokens=4096)
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
needs_root = pytest.mark.skipif(emulate.missing() is not None, reason=f"needs {emulate.missing()}")


def _simulated(case, name):
    """Seconds of the slowest rank, if the programs that ranks get run on the model's clock, part by part."""
    built = [NAMED[name].build(case, World(rank, case.where.size)) for rank in range(case.where.size)]
    total = 0.0
    for parts in zip(*(each.parts for each in built), strict=True):
        drawn = Schedule("", Route(1, len(parts)), tuple(part.program for part in parts))
        if any(drawn.programs):
            seconds = [part.seconds for part in parts]
            timeline = simulated(
                drawn, parts[0].sizes, lambda rank, action, seconds=seconds: seconds[rank](action),
                case.where.intra, case.model,
            )  # fmt: skip
            total += timeline.seconds
        total += max(part.after for part in parts)
    return total, built[0].predicted


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("case", [CELL, replace(CELL, cluster="2x2", nic=0.5)], ids=["2x4", "2x2"])
def test_what_ranks_play_takes_as_long_as_predicted_on_the_models_clock(name, case):
    seconds, predicted = _simulated(case, name)
    assert seconds == pytest.approx(predicted, rel=2e-3)


@pytest.mark.parametrize("name", NAMED)
def test_the_kernels_time_is_what_the_busiest_rank_waits_in_the_place_of_kernels(name):
    """Parts that are computed one by one cost a few rows more than all at once."""
    per_rank = [NAMED[name].build(CELL, World(rank, 8)) for rank in range(8)]
    waited = [
        sum(p.seconds(a) for p in built.parts for a in p.program if isinstance(a, Compute))
        for built in per_rank
    ]
    if name == "all-gather":  # its kernel comes after the gather, as one call
        assert max(waited) == 0 and 0 < per_rank[0].kernel < sum(p.after for p in per_rank[0].parts)
    else:
        assert per_rank[0].kernel <= max(waited) * 1.0001 and max(waited) < 1.1 * per_rank[0].kernel


def test_an_all_to_all_reaches_every_member_of_the_group():
    programs = [exchange(rank, 4, ["rows", "bundle"]) for rank in range(8)]
    for rank, program in enumerate(programs):
        sent = [(a.channel.kind, a.peer) for a in program if isinstance(a, Send)]
        group = range(rank - rank % 4, rank - rank % 4 + 4)
        assert sorted(sent) == sorted((kind, to) for kind in ("rows", "bundle") for to in group if to != rank)
    assert exchange(3, 1, ["rows"]) == ()


def _played(rank, size):
    case = PaperCase(cluster="1x2", tokens=256)
    built = {name: method.build(case, World(rank, size)) for name, method in NAMED.items()}
    for each in built.values():
        play(each.parts, Scale(1e-3, 1e5))
    return {name: each.sent(rank, 2) for name, each in built.items()}


def test_programs_are_played_by_processes_and_their_bytes_counted():
    for sent in processes(2, _played):
        assert set(sent) == set(NAMED)
        share = PaperCase(tokens=256).share
        kv, dkv = share.bundle_bytes(of_queries=False)
        assert sent["double ring"][Link.INTER] == 0
        # K and V in both passes; float32 sums to the next rank, and home.
        assert sent["double ring"][Link.INTRA] == 2 * kv + 2 * dkv
        assert sent["USP"][Link.INTRA] < sent["double ring"][Link.INTRA] * 1.5


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--cluster", "4by8"], "a cluster is nodes x ranks of a node, such as 4x8"),
        (["--cluster", "1x1"], "2 ranks or more"),
        (["--cluster", "tpu:2x4"], "unknown machine 'tpu'"),
        (["--case", "nic=2.0"], "nic must be a share above 0 and at most 1, got 2"),
        (["--case", "nic=0.0"], "nic must be a share above 0 and at most 1, got 0"),
        (["--methods", "ring9"], "unknown method 'ring9'; legal: flat ring"),
        (["--methods", "Ulysses"], "40 heads do not divide by 32"),
        (["--cluster", "2x4", "--case", "cluster=4x8"], "cluster is given twice: as '2x4', and in"),
        (["--framework", "megatron"], "paper has no option --framework"),
    ],
)  # fmt: skip
def test_bad_options_are_one_line_and_leave_nothing_behind(words, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["bench", "paper", *words])
    assert done.exit_code == 2 and error in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and not list(tmp_path.iterdir())


def test_a_machine_without_tc_is_told_so_in_a_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(emulate.shutil, "which", lambda tool: None)
    done = CliRunner().invoke(app, ["bench", "paper", "--cluster", "2x2"])
    assert done.exit_code == 2 and "no ip and no tc on the PATH" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and not list(tmp_path.iterdir())


def test_an_option_of_one_subject_is_refused_by_the_others():
    done = CliRunner().invoke(app, ["bench", "attention", "--cluster", "2x4"])
    assert done.exit_code == 2 and "attention has no option --cluster" in done.stderr


def test_figures_follow_from_walls():
    case, pace = CELL, CELL.scale.seconds
    table = Table()
    for name, seconds in {"double ring": 0.12, "burst": 0.11, "auto": 0.1}.items():
        table[name, "predicted"], table[name, "kernel"] = [0.1], [0.09]
        table[name, "wall"] = [seconds * pace]
    found = {(method, meter): samples[0] for method, meter, samples in case.derive(table)}
    assert found["auto", "emulated"] == pytest.approx(0.1)
    assert found["auto", "exposed / emulated"] == pytest.approx(0.1)
    assert found[paper.EVERY, paper.OFF] == pytest.approx(0.2)
    assert found["auto", paper.BEHIND] == pytest.approx(0.1 / 0.11)
    assert found["double ring", "this / auto"] == pytest.approx(1.2)


def test_the_lead_with_half_the_nic_is_compared_with_that_of_the_whole():
    tables = {
        "4K tokens a GPU": Table({("USP", "this / auto"): [1.1], ("double ring", "this / auto"): [1.3]}),
        "4K tokens a GPU, with half the NIC": Table(
            {("USP", "this / auto"): [1.2], ("burst", "this / auto"): [1.0]}
        ),
    }
    found = {meter: samples[0] for _, meter, samples in PaperCase.summary(tables)}
    assert found[f"4K tokens a GPU: {paper.GROWS}"] == pytest.approx(1.2 / 1.1)


def test_the_papers_lead_over_double_ring_is_not_explained_by_bytes():
    """The figures of the page: by the model, and if nothing hid DoubleRing's messages."""
    case = PaperCase()
    ring, burst, auto = (NAMED[name].build(case, World(0, 1)) for name in ("double ring", "burst", "auto"))
    sent = ring.sent(0, case.where.intra)
    bare = sum(size / case.model.link(inter=link == Link.INTER) for link, size in sent.items())
    ratios = (ring.predicted / burst.predicted, ring.predicted / auto.predicted)
    said = '1.02 for the paper\'s method, and 1.02 for "auto"'
    assert said == '{:.2f} for the paper\'s method, and {:.2f} for "auto"'.format(*ratios)
    alone = f"{(ring.kernel + bare) / burst.predicted:.2f}"
    page = " ".join((ROOT / "docs" / "evidence" / "benchmark.md").read_text().split())
    assert f"predicts {said}. If nothing hid DoubleRing's messages, the ratio would be {alone}." in page


@needs_root
@pytest.mark.slow
def test_a_small_cluster_is_emulated_beside_its_prediction():
    case = PaperCase(cluster="2x2", tokens=4096, pace=1.0)
    for _ in range(3):  # other work beside makes a run longer, never shorter
        results = run(PaperCase, {"cell": case}, [], 1, "cpu")
        assert not results.errors and not results.refused
        table = results.tables["cell"]
        ratios = {m: median(samples) for m, samples in table.column("emulated / predicted").items()}
        assert set(ratios) == set(NAMED) and min(ratios.values()) > 0.9
        if max(ratios.values()) < 1.1:
            break
    else:
        pytest.fail(f"longer than predicted, each time: {ratios}")


@pytest.mark.parametrize("file", sorted(RESULTS.glob("paper*.json")), ids=lambda file: file.stem)
def test_committed_measurements_are_beside_todays_predictions(file):
    results = read(file)
    missed = {bar.case for bar in results.bars if bar.meter == paper.OFF and not bar.reached}
    assert len(missed) <= 1
    for name, fields in results.cases.items():
        case, table = PaperCase(**fields), results.tables[name]
        for method, seconds in table.column("emulated").items():
            predicted = NAMED[method].build(case, World(0, case.where.size)).predicted
            assert predicted == pytest.approx(table[method, "predicted"][0], rel=0.01), (name, method)
            within = 0.06 if name in missed else paper.WITHIN
            assert median(seconds) == pytest.approx(predicted, rel=within), (name, method)

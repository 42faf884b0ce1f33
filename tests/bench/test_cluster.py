"""The emulated cluster: links as slow as asked for, and nothing left behind."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import limits
import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from burst_bench import emulate
from burst_bench.core import ALL
from burst_bench.results import read
from burst_bench.run import run
from burst_bench.subjects import topology
from burst_bench.subjects.topology import ClusterCase
from burst_mcore.attention.candidates import Ranks
from burst_mcore.rates import Rates
from burst_plan.cli import app

RATES = Rates(intra=40e6, inter=4e6, compute=1e12)
needs_root = pytest.mark.skipif(emulate.missing() is not None, reason=f"needs {emulate.missing()}")


def hop_seconds(rank, size):
    """Seconds of a hop of 400 KB to the next rank: within the node for even ranks, between nodes for odd."""
    out, into = torch.zeros(100_000), torch.zeros(100_000)
    seconds = []
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        hop = [
            dist.P2POp(dist.irecv, into, (rank - 1) % size),
            dist.P2POp(dist.isend, out, (rank + 1) % size),
        ]
        recv, send = dist.batch_isend_irecv(hop)
        recv.wait()
        seconds.append(time.perf_counter() - start)
        send.wait()
    return sorted(seconds)[1]


@needs_root
def test_links_are_as_slow_as_asked_for():
    links = (RATES.inter, RATES.intra) * 2  # a rank waits for the one before it
    ideals, best = [400_000 / link for link in links], [math.inf] * 4
    for _ in range(3):  # other work beside makes a hop longer, never shorter
        seconds = emulate.run(Ranks(4, 2), RATES, hop_seconds)
        assert all(0.8 * ideal < each for each, ideal in zip(seconds, ideals, strict=True)), seconds
        best = [min(each) for each in zip(best, seconds, strict=True)]
        if all(each < 1.5 * ideal + 0.02 for each, ideal in zip(best, ideals, strict=True)):
            break
    else:
        pytest.fail(f"hops take {best}, for {ideals}")


def neighbours(rank, size):
    """The other ranks that this one has in its table of neighbours after a message, asked for and given."""
    dist.all_reduce(torch.ones(1))
    lines = subprocess.check_output(["ip", "-4", "neigh"], text=True).splitlines()
    return len(lines), sum("PERMANENT" in line for line in lines)


@needs_root
def test_ranks_do_not_ask_for_the_addresses_of_others():
    """Linux remembers 1024 answers, of all networks together: too few for two clusters of 32 at once."""
    assert emulate.run(Ranks(4, 2), RATES, neighbours) == [(3, 3)] * 4


def fails(rank, size):
    assert rank != 1, "rank 1 has its reasons"
    dist.barrier()


@needs_root
def test_a_rank_that_fails_fails_the_run():
    with pytest.raises(RuntimeError, match="rank 1 has its reasons"):
        emulate.run(Ranks(2, 1), RATES, fails)


def is_killed(rank, size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2 * limits.SECONDS)


@needs_root
def test_a_rank_that_is_killed_fails_the_run():
    with pytest.raises(RuntimeError, match="was killed"):
        emulate.run(Ranks(2, 1), RATES, is_killed, timeout=limits.SECONDS)


def sleeps(rank, size, folder):
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(2 * limits.SECONDS)


@needs_root
def test_a_killed_run_leaves_nothing_behind(tmp_path):
    def networks():
        commands = (["ip", "-o", "link"], ["ip", "netns", "list"])
        return [subprocess.check_output(command, text=True) for command in commands]

    before = networks()
    code = (
        "import test_cluster as t; from burst_bench import emulate; "
        f"emulate.run(t.Ranks(4, 2), t.RATES, t.sleeps, {str(tmp_path)!r})"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    script = tmp_path / "main.py"
    script.write_text(f"if __name__ == '__main__':\n    {code}\n")
    launcher = subprocess.Popen([sys.executable, str(script)], env=environment)

    def ranks():
        return [p.name for p in tmp_path.iterdir() if p.name.isdigit()]

    limits.until(lambda: len(ranks()) == 4, "four ranks did not begin")
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    limits.until(lambda: not any(Path("/proc", x).exists() for x in ranks()), "ranks outlive their launcher")
    assert networks() == before


def _timed(case, repeats=5):
    """{way: (median wall, predicted)} of a case."""
    results = run(ClusterCase, {"cell": case}, [], repeats, "cpu")
    assert not results.errors and not results.refused, (results.errors, results.refused)
    table = results.tables["cell"]
    walls = {way: median(samples) for (way, meter), samples in table.items() if meter == "wall"}
    return {way: (wall, table[way, "predicted"][0]) for way, wall in walls.items()}


@needs_root
def test_a_configuration_is_timed_beside_its_prediction():
    ways = "backward=query | backward=kv"
    case = ClusterCase(nodes=2, intra=1, intra_rate=4e6, inter_rate=4e6, tokens=64, ways=ways)
    timings = []
    for _ in range(3):  # other work beside makes a run longer, never shorter
        timings.append(_timed(case.with_compute(1)))
        best = {way: min(each[way] for each in timings) for way in timings[0]}
        if all(wall < 2 * predicted + 0.05 for wall, predicted in best.values()):
            break
    else:
        pytest.fail(f"longer than predicted, each time: {timings}")
    assert len(best) == 2 and all(0.8 * predicted < wall for wall, predicted in best.values())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.setattr(emulate.os, "geteuid", lambda: 1000), "root"),
        (lambda m: m.setattr(emulate.shutil, "which", lambda tool: None), "no ip and no tc on the PATH"),
        (lambda m: m.setattr(emulate.sys, "platform", "darwin"), "Linux"),
    ],
)
def test_a_machine_that_cannot_is_told_why(change, words, monkeypatch):
    monkeypatch.setattr(emulate.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(emulate.os, "geteuid", lambda: 0)
    change(monkeypatch)
    done = CliRunner().invoke(app, ["bench", "topology"])
    assert done.exit_code == 2
    assert words in done.output
    with pytest.raises(RuntimeError, match=words):
        emulate.run(Ranks(2, 1), RATES, fails)


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "topology.json"


BARS = {
    ("double ring, 2 x 2", "flat over double ring"): 2.2,
    ("double ring, 2 x 4", "flat over double ring"): 4.5,
    ("overlap, 2 x 4", "without overlap over with"): 1.4,
    ("heads across nodes, 4 x 4, heads 8:8", "gain, of predicted"): 0.8,
    ("heads across nodes, 4 x 4, heads 8:2", "gain, of predicted"): 0.8,
    ("heads across nodes, 4 x 8, heads 8:8", "gain, of predicted"): 0.8,
    ("heads across nodes, 4 x 8, heads 8:8", "double ring over heads across nodes"): 1.5,
    ("heads across nodes, 4 x 8, heads 8:2", "gain, of predicted"): 0.8,
    (ALL, "right choices of auto"): 0.9,
}


def test_the_committed_results_reach_their_bars():
    whole, results = json.loads(RESULTS.read_text()), read(RESULTS)
    assert re.fullmatch("[0-9a-f]{12}", whole["commit"]), "made by a committed state, and says which"
    assert "cores" in whole["machine"]
    assert {(bar.case, bar.claim): bar.bound for bar in results.bars} == BARS
    for bar in results.bars:
        assert not bar.at_most and bar.value >= bar.bound, bar.claim


def test_todays_predictions_are_within_15_per_cent_of_what_was_measured():
    results, count = read(RESULTS), 0
    for name, table in results.tables.items():
        # Heads across nodes: 16 and 32 ranks on 2 cores, see their bars.
        if name == ALL or name.startswith("heads across nodes"):
            continue
        case = ClusterCase(**results.cases[name])
        latency = table["message", "hop"][0]
        for (way, meter), samples in table.items():
            if meter == "wall":
                count += 1
                # "auto", by the rule of its time, took the fastest way, or one as fast within 1 %.
                seconds = topology.predicted(case, way, latency)
                if way == topology.AUTO:
                    seconds = min(c.seconds for c in topology.costed(case, way, latency))
                ratio = seconds / median(samples)
                assert 1 / 1.15 <= ratio <= 1.15, (name, way)
    assert count == 366


def test_the_committed_cells_are_those_of_the_subject():
    cases = ClusterCase.named("cpu")
    committed = read(RESULTS).cases
    assert set(cases) == set(committed) and len(cases) == 31
    for name, case in cases.items():
        assert {**committed[name], "compute": 0} == {**vars(case), "compute": 0}, name
        if not name.startswith("overlap"):  # there the model chose it, with the rates of its time
            assert committed[name]["compute"] == pytest.approx(case.compute), name


@needs_root
def test_auto_is_what_the_model_says_and_nearly_the_best():
    """2 x 2 nodes, the links' rates given: auto beside each ring, median of 5."""
    ways = " | ".join(f"ring={ring}" for ring in ("auto", "flat", "double", "direct"))
    case = ClusterCase(intra_rate=20e6, inter_rate=2e6, tokens=128, ways=ways)
    for _ in range(3):  # other work beside makes a run longer, never shorter
        timings = _timed(case)
        auto, predicted = timings.pop("ring=auto")
        fastest = min(wall for wall, _ in timings.values())
        if abs(auto / predicted - 1) <= 0.15 and auto <= 1.10 * fastest:
            break
    else:
        pytest.fail(f"auto {auto:.3f} s, predicted {predicted:.3f}, the best {fastest:.3f}")

"""The emulated cluster: links as slow as asked for, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import limits
import pytest

from burst_bench import emulate
from burst_bench.core import ALL
from burst_bench.results import read
from burst_bench.run import run
from burst_bench.subjects import topology
from burst_bench.subjects.topology import ClusterCase
from burst_mcore import Layout
from burst_mcore.attention.choose import Question, best, candidates, settings_of
from burst_mcore.rates import Rates

RATES = Rates(intra=40e6, inter=4e6, compute=1e12)
needs_root = pytest.mark.skipif(emulate.missing() is not None, reason=f"needs {emulate.missing()}")


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
        f"emulate.run(t.topology.Ranks(4, 2), t.RATES, t.sleeps, {str(tmp_path)!r})"
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


@needs_root
def test_a_configuration_is_timed_beside_its_prediction():
    compared = "backward=query | backward=kv"
    case = ClusterCase(
        nodes=2, intra=1, intra_rate=4e6, inter_rate=4e6, tokens=64, compared=compared
    ).with_compute(1)
    results = run(ClusterCase, {"cell": case}, [], 3, "cpu")
    assert not results.errors and not results.refused, (results.errors, results.refused)
    table = results.tables["cell"]
    walls = table.column("wall")
    assert walls.keys() == {*compared.split(" | ")}
    for name, samples in walls.items():  # other work beside makes a run longer, never shorter
        assert 0.8 * table[name, "predicted"][0] < median(samples)


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "topology.json"


def test_todays_predictions_are_within_15_per_cent_of_what_was_measured():
    results, count = read(RESULTS), 0
    for name, table in results.tables.items():
        # Heads across nodes: 16 and 32 ranks on 2 cores, see their bars.
        if name == ALL or name.startswith("heads across nodes"):
            continue
        case = ClusterCase(**results.cases[name])
        latency = table["message", "latency"][0]
        for (settings, meter), samples in table.items():
            if meter == "wall":
                count += 1
                # "auto", by the rule of its time, took the fastest route, or one as fast within 1 %.
                seconds = topology.predicted(case, settings, latency)
                if settings == topology.AUTO:
                    seconds = min(c.seconds for c in topology.costed(case, settings, latency))
                ratio = seconds / median(samples)
                assert 1 / 1.15 <= ratio <= 1.15, (name, settings)
    assert count == 366


def test_todays_rule_chooses_what_was_measured_as_fastest():
    """In every cell of "auto" within 5 % of the fastest measured route (3 % when this was written)."""
    results, cells = read(RESULTS), 0
    for name, table in results.tables.items():
        walls = {settings: median(x) for (settings, meter), x in table.items() if meter == "wall"}
        if walls.pop(topology.AUTO, None) is None:
            continue
        case, cells = ClusterCase(**results.cases[name]), cells + 1
        rates = replace(case.rates, latency=table["message", "latency"][0])
        n, config = case.tokens * case.where.size, topology.config_of(topology.AUTO)
        question = Question(case.share, Layout("zigzag"), case.seen, n, case.where, rates)
        chosen = topology.settings_of(best(candidates(question, settings_of(config, question))))
        assert walls[chosen] <= topology.WITHIN * min(walls.values()), (name, chosen)
    assert cells == 24

"""Timelines: recorded and predicted, as a trace; the commands that show them."""

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dense import problem
from ranks import processes
from typer.testing import CliRunner

from burst_bench.methods.attention import share_of
from burst_bench.trace import record
from burst_mcore import BurstConfig, Layout, Mask, Topology, burst_attention
from burst_mcore.attention.choose import AS_FAST, Question, decide
from burst_mcore.attention.schedule.actions import Compute, Recv
from burst_mcore.attention.schedule.route import Route, program, schedule
from burst_mcore.rates import Rates
from burst_mcore.recurrent.scan import scan
from burst_plan.cli import app
from burst_plan.explain import predict
from burst_plan.simulate.cost import Sizes
from burst_plan.simulate.play import play
from burst_plan.simulate.search import costed, taken
from burst_plan.words import mask_of


def _recorded(rank, size):
    topology = Topology.from_group(dist.group.WORLD, intra_size=2)
    q, k, v, dout = problem(0, 64)
    q.requires_grad_()
    config = BurstConfig(backward="query", ring="double")
    with record(rank) as events:
        out = burst_attention(q, k, v, topology=topology, mask=Mask.causal(), config=config)
        out.backward(dout)
    return events


def test_every_message_and_compute_of_a_ring_is_recorded():
    for rank, events in enumerate(processes(4, _recorded)):
        actions = [a for pass_ in ("forward", "query") for a in program(rank, Route(2, 2), pass_)]
        assert {e.rank for e in events} == {rank} and all(e.started < e.ended for e in events)
        assert sum(e.label.startswith("[") for e in events) == sum(isinstance(a, Compute) for a in actions)
        assert sum("<" in e.label for e in events) == sum(isinstance(a, Recv) for a in actions)
        first = {e.lane: e for e in reversed(events)}  # the steps leave before the first compute is over
        assert first["inter data"].started < first["compute"].ended
        assert first["intra data"].started < first["compute"].ended


def test_the_scan_of_the_page_and_of_documents():
    page = (Path(__file__).parents[2] / "docs" / "features" / "hybrids.md").read_text()
    picture = page.split("```text\n")[1].split("```")[0]
    layout = Layout.of("contiguous")
    assert f"{scan(layout, 4096, size=4, intra=2)}\n" == picture
    apart = str(scan(layout, 4096, size=4, intra=2, ends=(0, 2048, 4096)))
    assert "0[0:1]>1" in apart and "1[0:1]>3" in apart and "0[0:2]" not in apart


@pytest.mark.parametrize(
    ("cluster", "mask", "seq"),
    [
        *itertools.product(["h100:1x8", "a800:4x8"], ["causal", "causal & window:8192"], [2**17]),
        ("h100:9x8", "causal & window:8192", 72 * 2**12),
    ],
)
def test_explain_says_what_a_call_does_by_default_and_by_auto(cluster, mask, seq):
    """Two lines and two marks are the decisions of calls; a third has the settings of a faster way."""
    done = CliRunner().invoke(
        app, ["explain", *f"--heads 32 --kv-heads 8 --seq {seq} --cluster {cluster}".split(), "--mask", mask]
    )
    assert done.exit_code == 0, done.output
    ranks, machine = predict.cluster(cluster)
    shard = share_of(seq // ranks.size, 32, 8, 128, torch.bfloat16)
    question = Question(shard, Layout("zigzag"), mask_of(mask, seq), seq, ranks, machine.rates).typical
    lines = done.output.splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line[:2] in ("* ", "+ ", "*+", "! ")}
    for word, mark, degree in (("default:", "*", 1), ("auto:", "+", "auto")):
        config = BurstConfig(head_parallel=degree)
        chosen, (route, direction, _) = taken(config, question), decide(config, question)
        line = next(line for line in lines if line.startswith(word))
        assert f"backward='{direction}' ({route}): {chosen.seconds * 1e3:.4g} ms; " in line
        row = next(cells for marks, cells in rows.items() if mark in marks)
        assert row[1] == str(route.heads) and f"{chosen.seconds * 1e3:.4g}" in row
    least = min(each.seconds for each in costed(BurstConfig(head_parallel="auto"), question))
    assert f"takes {chosen.seconds / least - 1:.1%} longer than the simulated best" in done.output
    named = [line for line in lines if line.startswith("by name: ring=")]
    assert len(named) == ("!" in "".join(rows)) == (chosen.seconds > AS_FAST * least)


SLOW = Rates(intra=1e9, inter=1e8, compute=1.0, latency=0.0)


def test_a_wait_says_who_waits_for_which_message_and_how_long():
    """Rank 0 of a ring of 2 computes 1 s, and its partner's block takes 3 s."""
    sizes = Sizes({"data": 3 * 10**9}, 1)
    timeline = play(schedule(Route(1, 2), "forward"), sizes, lambda rank, action: 1.0, 2, SLOW)
    assert timeline.seconds == pytest.approx(4.0)
    (wait,) = timeline.exposed()
    assert (wait.rank, wait.step, wait.peer, wait.lane) == (0, 0, 1, "intra data")
    assert (wait.began, wait.seconds) == (pytest.approx(1.0), pytest.approx(2.0))
    assert (
        str(wait) == "rank 0 waits 2e+03 ms in step 0 for intra data from rank 1 (data0<1, posted in step 0)"
    )
    assert [each.rank for each in timeline.waits] == [0, 1]
    message = next(e for e in timeline.events if e.lane == "intra data" and e.rank == 0)
    assert (message.posted, message.started, message.ended) == (0.0, 0.0, pytest.approx(3.0))

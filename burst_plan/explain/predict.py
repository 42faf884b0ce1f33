"""Predictions of the cost model for a call on any cluster, for the commands `explain` and `draw`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from burst_mcore.attention.choose import AS_FAST, Candidate, Question, best, settings_of
from burst_mcore.attention.geometry.plan import Plan, plan_of
from burst_mcore.attention.geometry.shard import Ranks, Shard
from burst_mcore.attention.schedule.actions import Link, Pass
from burst_mcore.attention.schedule.heads import legal_degrees
from burst_mcore.attention.schedule.route import Schedule, schedule
from burst_mcore.config import BurstConfig
from burst_mcore.layout import Layout
from burst_mcore.mask.terms import Documents
from burst_mcore.rates import Rates
from burst_plan.explain.pairs import unevenness
from burst_plan.explain.problem import DTYPES, LayerProblem
from burst_plan.explain.verify import verify
from burst_plan.machines import Machine, machine
from burst_plan.simulate.cost import bytes_of_all, message_bytes
from burst_plan.simulate.costing import pairs_of, work_of
from burst_plan.simulate.play import Timeline, play
from burst_plan.simulate.reason import reason, to_paste
from burst_plan.simulate.search import candidates, costed, taken
from burst_plan.tables import table
from burst_plan.words import gpu, in_words

MOST_RANKS = 16384
"""The largest cluster: tables of pairs of ranks take 2 GB there."""


def cluster(text: str, gpu_text: str | None = None) -> tuple[Ranks, Machine | None]:
    """Return the ranks of a cluster, and its machine if it has a name: M x L, such as 4x8 or a800:4x8.

    gpu_text: a machine in the syntax of `burst_plan.words.gpu`.

    Raises:
        ValueError: another text, too many ranks, an unknown machine, or two machines.
    """
    match = re.fullmatch(r"(?:([\w -]+):)?(\d{1,9})x(\d{1,9})", text)
    if match is None or 0 in (int(match[2]), int(match[3])):
        raise ValueError(
            f"a cluster is nodes x ranks of a node, such as 4x8, or with a machine a800:4x8, got {text!r}"
        )
    ranks = Ranks(int(match[2]) * int(match[3]), int(match[3]))
    if ranks.size > MOST_RANKS:
        raise ValueError(f"a cluster has at most {MOST_RANKS} ranks here, got {ranks.size} in {text!r}")
    if gpu_text is not None and match[1] is not None:
        raise ValueError(f"--gpu and the machine in --cluster {text}: give a cluster such as 1x8 with --gpu")
    if gpu_text is not None:
        return ranks, gpu(gpu_text, ranks.intra, int(match[2]))
    return ranks, None if match[1] is None else machine(match[1])


def layout_of(text: str, problem: LayerProblem, ranks: Ranks) -> Layout:
    """Return a layout by its name; "auto" balances the mask, "zigzag-documents" follows its documents.

    Raises:
        ValueError: an unknown name, or a layout that does not go with the mask, the sequence or the ranks.
    """
    if text == "auto":
        return Layout.for_mask(problem.seen, problem.seq, ranks.size)
    if text == "zigzag-documents":
        ends = [term.ends for term in problem.seen.all_terms() if isinstance(term, Documents)]
        if len(ends) != 1:
            raise ValueError(
                f"mask {problem.mask!r} must have documents, once: documents:L1,L2,... or "
                "documents:random,COUNT"
            )
        layout = Layout(text, ends=tuple(ends[0].tolist()))
    else:
        try:
            layout = Layout.of(text)
        except ValueError as error:
            raise ValueError(f"{error}; also auto, and zigzag-documents with a mask of documents") from None
    layout.padded(problem.seq, ranks.size)
    return layout


def question_of(problem: LayerProblem, ranks: Ranks, rates: Rates, text: str) -> Question:
    """Return the question for the cost model; text: a layout's name. Raises ValueError as `layout_of`."""
    layout = layout_of(text, problem, ranks)
    shard = Shard(
        batch=problem.batch,
        tokens=layout.padded(problem.seq, ranks.size) // ranks.size,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        head_dim=problem.head_dim,
        value_dim=problem.of_values,
        dtype=DTYPES[problem.dtype],
        latent=problem.latent,
        latent_rotates=problem.latent is not None,
    )
    return Question(shard, layout, problem.seen, problem.seq, ranks, rates)


def explain(problem: LayerProblem, ranks: Ranks, rates: Rates, config: BurstConfig, layout: str) -> str:
    """Return a table of all candidates with simulated costs, and the rule's candidates with their regret.

    Args:
        config: the given settings; heads may also be shared.

    Raises:
        ValueError: as `layout_of`.
    """
    question = question_of(problem, ranks, rates, layout)
    of_kind = question.typical
    degrees = legal_degrees(ranks, problem.heads, problem.kv_heads)
    options = costed(config, of_kind, tuple(degrees))
    auto = replace(config, head_parallel="auto")
    default = [each for each in options if config.head_parallel in ("auto", each.route.heads)]
    words: dict[str, Sequence[Candidate]] = {"default": default, "auto": options}
    choices = {"default": taken(config, of_kind, options), "auto": taken(auto, of_kind, options)}
    if best(options).seconds * AS_FAST < choices["auto"].seconds:
        words["by name"], choices["by name"] = options, best(options)
    notes = (
        f"{word + ':':9}{to_paste(c)} ({c.route}): {c.seconds * 1e3:.4g} ms; {reason(c, words[word])}\n"
        for word, c in choices.items()
    )
    regret = choices["auto"].seconds / min(each.seconds for each in options) - 1
    distinct_runs = {_key(each): each for each in (*options, *choices.values())}.values()
    order = sorted(distinct_runs, key=lambda each: (each.seconds, _key(each) != _key(choices["auto"])))
    rows = table([_row(c, choices) for c in order], LESS, floatfmt=".4g")
    route, direction = choices["auto"].route, choices["auto"].direction
    plan = plan_of(question.layout, problem.seen, problem.seq, route.placement)
    excess = max(unevenness(plan, pass_) for pass_ in (Pass.FORWARD, Pass(direction)))
    ends = of_kind.mask.document_ends
    kind = "documents count as {} tokens on average, for any batch of this kind\n"
    return (
        f"{rows}\n\n{''.join(notes)}"
        f'regret: the rule\'s choice by "auto" takes {max(0.0, regret):.1%} longer than the simulated best\n'
        f"mask {problem.mask}, layout {question.layout}: the busiest rank has {excess:.2f} x the mean work\n"
        f"{'' if ends is None else kind.format(int(ends[-1]) // (len(ends) - 1))}"
        f'marked *: the choice of a call by default, +: by all "auto", !: of settings alone; times are\n'
        "of the slowest rank, MB what a rank sends on average; exposed: time in which no kernel runs there;\n"
        f"(predicted, not measured: {in_words(rates)})"
    )


def _key(candidate: Candidate) -> tuple[object, ...]:
    """Return the key of a candidate, equal for both ring directions."""
    return candidate.ring, candidate.direction, replace(candidate.route, mirrored=False)


LESS = ("intra MB", "exposed ms", "kernel ms", "positions", "inter MB", "forward ms", "backward ms")
"""Columns that a narrow terminal leaves out, in this order."""


def _row(candidate: Candidate, choices: Mapping[str, Candidate]) -> dict[str, Any]:
    route, marks = candidate.route, {"default": "*", "auto": "+", "by name": "!"}
    return {
        "": "".join(marks[word] for word, each in choices.items() if _key(each) == _key(candidate)),
        "head_parallel": f"{route.heads}{' outer' * route.outer}",
        "backward": candidate.direction,
        "ring": f"{candidate.ring}{', mirrored' * route.mirrored}",
        "positions": f"{route.nodes} x {route.intra}",
        "forward ms": candidate.forward_seconds * 1e3,
        "backward ms": candidate.backward_seconds * 1e3,
        "total ms": candidate.seconds * 1e3,
        "kernel ms": candidate.compute_seconds * 1e3,
        "exposed ms": max(0.0, candidate.seconds - candidate.compute_seconds) * 1e3,
        "inter MB": candidate.inter_bytes / 1e6,
        "intra MB": candidate.intra_bytes / 1e6,
    }


@dataclass(frozen=True)
class Drawing:
    """A schedule and its predicted timeline."""

    schedule: Schedule
    timeline: Timeline
    plan: Plan
    why: str
    """Why this ring direction, or this ring, was chosen."""
    sent: Mapping[Link, tuple[int, int]]
    """Bytes that all ranks send in the pass, by link ("intra", "inter"); then if each rank read all rows."""


def draw(
    problem: LayerProblem, ranks: Ranks, rates: Rates, config: BurstConfig, pass_: Pass, layout: str
) -> Drawing:
    """Return the schedule of a pass, and its predicted timeline.

    The candidate is that of a call with these settings: the best ring for "auto", and the better direction
    of a ring.

    Raises:
        ValueError: ranks cannot share the heads in this way, or as `layout_of`.
    """
    question = question_of(problem, ranks, rates, layout)
    config = replace(config, backward=Pass.QUERY if pass_ == Pass.QUERY else Pass.KV)  # as in trace_pass
    options = candidates(question.typical, settings_of(config, question))
    choice = taken(config, question.typical)
    shard, route = question.shard, choice.route
    plan = plan_of(question.layout, problem.seen, problem.seq, route.placement)

    pairs = pairs_of(question.layout, problem.seen, problem.seq, ranks.size)
    seconds = work_of(shard, pairs.T if pass_ == Pass.QUERY else pairs, route, pass_, rates).of_action
    programs, sizes = schedule(route, pass_, plan), message_bytes(shard, route, pass_)
    verify(programs, ranks.intra)
    timeline = play(programs, sizes, seconds, ranks.intra, rates)
    volumes, of_all_rows = (
        bytes_of_all(each.programs, sizes, ranks.intra) for each in (programs, schedule(route, pass_))
    )
    by_link = {link: (size, of_all_rows[link]) for link, size in volumes.items()}
    return Drawing(programs, timeline, plan, reason(choice, options), by_link)


def exposed(drawing: Drawing, limit: int = 5) -> str:
    """Describe exposed communication: the longest waits of the last rank to end."""
    waits, seconds = drawing.timeline.exposed(), drawing.timeline.seconds
    if not waits:
        return "exposed: nothing: the rank that ends last never waits for a message"
    total = sum(wait.seconds for wait in waits)
    lines = "\n".join(f"  {wait}" for wait in waits[:limit])
    more = f"\n  and {len(waits) - limit} shorter waits" if len(waits) > limit else ""
    return (
        f"exposed: the rank that ends last waits {total * 1e3:.3g} of {seconds * 1e3:.3g} ms (predicted)\n"
        f"{lines}{more}"
    )


def summary(drawing: Drawing) -> str:
    """Describe the balance of the work, and the rotating rows against a ring in which each rank reads all."""
    plan, of_queries = drawing.plan, drawing.schedule.queries_rotate
    keys, queries = (unevenness(plan, pass_) for pass_ in (Pass.FORWARD, Pass.QUERY))
    remote_rows = plan.reading(of_queries=of_queries).elsewhere
    most_rows = max(1, plan.rows * plan.size * (plan.size - 1))
    sizes = drawing.sent.items()
    volumes = ", ".join(f"{link} {_short(size)} of {_short(dense)}" for link, (size, dense) in sizes if dense)
    return (
        f"layout: {plan.layout}\n"
        f"work:   the busiest rank has {max(keys, queries):.3f} x the mean (where keys rotate {keys:.3f}, "
        f"where queries rotate {queries:.3f})\n"
        f"read:   {remote_rows:,} rows of other positions, {remote_rows / most_rows:.1%} of {most_rows:,}\n"
        f"sent:   {volumes or 'nothing'}"
    )


def _short(size: int) -> str:
    """Return bytes for people to read."""
    return f"{size / 1e9:.4g} GB" if size >= 1e9 else f"{size / 1e6:.4g} MB"

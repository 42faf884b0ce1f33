"""A plan as one page: memory, step and ranked ways, with sliders over lengths and GPUs; nothing is loaded."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from importlib.resources import files
from typing import Any

from burst_mcore.attention.candidates import Ranks
from burst_plan.step.figures import PredictedStep
from burst_plan.step.memory import total
from burst_plan.step.search import Answer, kind, least, search

LENGTHS = (0.125, 0.25, 0.5, 1, 2, 4)
"""Stops of the slider for the sequence length, as multiples of the length that is planned."""
GPUS = (0.25, 0.5, 1, 2)
"""Stops of the slider for GPUs, as multiples of the cluster's; nodes stay whole."""
SHOWN = 10
"""Ways of a stop that the page lists."""


def page(answer: Answer) -> str:
    """Return the page of an answer: the template with the plan's data and the stops of the sliders."""
    cells = list(_cells(answer))
    data = {
        "planned": {"seq": answer.seq, "gpus": answer.place.ranks.size},
        "seqs": sorted({cell["seq"] for cell in cells}),
        "gpus": sorted({cell["gpus"] for cell in cells}),
        "memory": answer.place.memory,
        "usable": answer.place.usable,
        "cells": cells,
    }
    title = f"{answer.model.name} on {answer.place.name}: a training step, predicted"
    filling = {"title": escape(title), "plan": _embedded(answer.as_json()), "stops": _embedded(data)}
    template = files("burst_plan.step").joinpath("page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda hole: filling[hole[1]], template)


def _embedded(data: Any) -> str:
    """Return JSON that cannot end the script element which holds it."""
    return json.dumps(data).replace("<", "\\u003c")


def _cells(answer: Answer) -> Iterator[dict[str, Any]]:
    """Yield what is best at each stop of the sliders."""
    ranks = answer.place.ranks
    sizes = [int(ranks.size * share) for share in GPUS if ranks.size * share % 1 == 0]
    for size in (n for n in sizes if n <= ranks.intra or n % ranks.intra == 0):
        place = replace(answer.place, ranks=Ranks(size, min(size, ranks.intra)))
        for seq in sorted({max(1, int(answer.seq * share)) for share in LENGTHS}):
            stop = {"gpus": size, "seq": seq}
            if (size, seq) == (ranks.size, answer.seq):
                yield stop | _cell(answer)
                continue
            try:
                there = search(answer.model, seq, answer.batch, place, answer.pinned, answer.mask)
            except ValueError as error:  # such as degrees that were given and do not divide these GPUs
                yield stop | {"ways": [], "slower": 0, "reason": str(error), "infeasible": {}, "least": None}
                continue
            yield stop | _cell(there)


def _cell(answer: Answer) -> dict[str, Any]:
    """Return the ways to list, the recommended first, or the memory that comes closest to fitting."""
    chosen = answer.chosen
    listed = [one for one in answer.ranked if one is not chosen][: SHOWN - 1]
    listed = [chosen, *listed] if chosen else []
    stacks = {} if chosen else {str(way): least(answer.model, way, answer.seq) for way in answer.legal}
    smallest = min(stacks, key=lambda way: total(stacks[way]), default=None)
    return {
        "ways": [_way(one) for one in listed],
        "slower": len(answer.ranked) - len(listed),
        "reason": answer.reason,
        "infeasible": dict(Counter(kind(why) for _, why in answer.infeasible).most_common()),
        "least": None if smallest is None else {"words": smallest, "memory": stacks[smallest]},
    }


def _way(one: PredictedStep) -> dict[str, Any]:
    shown = ("words", "seconds", "tokens_per_second_gpu", "mfu", "errors", "memory", "compute", "exposed")
    data = one.as_json()
    return {name: data[name] for name in shown} | {"attention": str(one.attention)}

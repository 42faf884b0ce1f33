"""How a call runs, decided once for each kind of question: by a search, where more than one way is left."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from burst_mcore.attention.autotune.question import Question, Settings, routes, settings_of
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.route import Route
from burst_mcore.config import BurstConfig


class Decision(NamedTuple):
    """How a call runs."""

    route: Route
    direction: Pass
    latent_travels: bool


def decide(config: BurstConfig, question: Question, travels: str = "off") -> Decision:
    """Return how a call runs: the only entry from a call, decided and logged once for each kind of question.

    Args:
        travels: `Latent.travels`; without a latent it does not matter.
    """
    travels = travels if question.shard.latent is not None else "off"
    return _of_kind(question.typical, settings_of(config, question), travels)


@lru_cache(maxsize=256)
def _of_kind(question: Question, settings: Settings, travels: str) -> Decision:
    route, *others = routes(question, settings)
    direction, *sides = settings.directions
    if question.ranks.size == 1 or not (others or sides or route.has_mirror or travels == "auto"):
        return Decision(route, direction, travels == "on")
    # Imported here: a call with one way left needs neither the cost model nor its simulators.
    from burst_mcore.attention.autotune.search import search

    return Decision(*search(question, settings, travels))

"""The ways that a configuration allows, with their costs; and how a call runs, decided once for each kind."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from burst_mcore.attention.autotune.candidate import Candidate
from burst_mcore.attention.autotune.choose import best, reason
from burst_mcore.attention.autotune.question import Question
from burst_mcore.attention.autotune.search import Settings, candidates, routes
from burst_mcore.attention.autotune.ways import (
    RINGS,
    SEARCHED,
    backward_passes,
    degrees_of,
)
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.route import Route
from burst_mcore.config import BurstConfig

logger = logging.getLogger("burst_mcore")


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


def costed(
    config: BurstConfig, question: Question, degrees: tuple[int, ...] | None = None, *, meshes: bool = False
) -> tuple[Candidate, ...]:
    """Return every way that a configuration allows, with its cost: flat rings, too, which "auto" never takes.

    Args:
        degrees: those of head parallelism to try; default all that the configuration allows.
        meshes: also try every mesh.
    """
    settings = settings_of(config, question, degrees)
    rings = RINGS if config.ring == "auto" else settings.rings
    return candidates(question, replace(settings, rings=rings, mesh="auto" if meshes else config.mesh))


def fastest(config: BurstConfig, question: Question) -> Candidate:
    """Return the way that "auto", or the configured way, takes; the layout of `config` is not used."""
    return best(candidates(question, settings_of(config, question), every=False))


def settings_of(config: BurstConfig, question: Question, degrees: tuple[int, ...] | None = None) -> Settings:
    """Return the settings that a configuration leaves to the search of a call."""
    # The ring of two ranks is their direct exchange, but that gradients come home in a dtype no wider.
    rings = SEARCHED if question.ranks.size > 2 else SEARCHED[:1]
    return Settings(
        overlap=config.overlap,
        rings=rings if config.ring == "auto" else (config.ring,),
        degrees=degrees_of(config, question.ranks, question.shard) if degrees is None else degrees,
        directions=backward_passes(config.backward),
        placement=config.head_placement,
        mesh=config.mesh,
    )


@lru_cache(maxsize=256)
def _of_kind(question: Question, settings: Settings, travels: str) -> Decision:
    if travels == "auto":
        travels = "on" if _latent_gains(question, settings) else "off"
    return Decision(*_way(_with_latent(question, travels), settings), travels == "on")


def _with_latent(question: Question, travels: str) -> Question:
    """Return the question where the latent travels, or K and V."""
    return replace(question, shard=replace(question.shard, latent_travels=travels == "on"))


def _latent_gains(question: Question, settings: Settings) -> bool:
    """Return whether the model predicts a gain if the latent travels, and not K and V.

    The call may not be slower; if both are as fast, the order of `best` decides, as by bytes between nodes.
    """
    if question.ranks.size == 1:
        return False
    expanded, latent = (
        best(candidates(_with_latent(question, travels), settings, every=False)) for travels in ("off", "on")
    )
    gains = latent.seconds <= expanded.seconds and best([expanded, latent]) is latent
    logger.info(
        "MLA: %s travel: predicted %.3g s with the latent, %.3g s with K and V",
        "the latent and its rope key" if gains else "K and V",
        latent.seconds,
        expanded.seconds,
    )
    return gains


def _way(question: Question, settings: Settings) -> tuple[Route, Pass]:
    """Return the route and the backward pass, by the cost model where more than one is left; log them."""
    [(_, route, _), *others] = routes(question, settings)
    direction, *sides = settings.directions
    if question.ranks.size == 1 or not (others or sides or route.has_mirror):
        return route, direction
    tried = candidates(question, settings, every=False)
    chosen = best(tried)
    logger.info("%s, backward %s: %s", chosen.route, chosen.direction, reason(chosen, tried))
    return chosen.route, chosen.direction

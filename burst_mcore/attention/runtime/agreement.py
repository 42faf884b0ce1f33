"""The agreement of a ring: the instance of `burst_mcore.agreement` that calls over a topology use."""

from __future__ import annotations

from burst_mcore.agreement import Agreement, Signature
from burst_mcore.attention.runtime.topology import Topology

__all__ = ["Agreement", "Signature", "agreement"]


def agreement(topology: Topology) -> Agreement | None:
    """Return the agreement of a ring, made at its first use; None for one rank, which agrees with nobody."""
    communicators = topology.communicators
    if communicators is None:
        return None
    if communicators.agreement is None:
        communicators.agreement = Agreement(
            communicators.control, communicators.ranks, topology.rank, communicators.abort
        )
    return communicators.agreement

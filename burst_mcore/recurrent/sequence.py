"""A sharded sequence, and the agreement of its ranks on an exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from burst_mcore.agreement.agreement import ALONE, Agreement
from burst_mcore.agreement.claims import Claim, Signature
from burst_mcore.attention.agree import agreement_of
from burst_mcore.attention.runtime.executor import Transport, transport_of
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.route import Route
from burst_mcore.layout import Layout
from burst_mcore.recurrent.fragments import Ends, Fragment, chains, fragments
from burst_mcore.recurrent.halo import halo
from burst_mcore.recurrent.programs import Exchange
from burst_mcore.recurrent.scan import scan
from burst_mcore.words import digest


class Own(NamedTuple):
    """A fragment of this rank, and its place in its chain; without a chain, place 0 of chain -1."""

    fragment: Fragment
    chain: int
    place: int
    last: int
    """The place of the chain's last fragment."""


@dataclass(frozen=True)
class Shards:
    """The sequence of one call, sharded over the ranks of a topology.

    `ends` are cu_seqlens of its documents, the same on all ranks; () stands for one document. Each document
    starts from a state of zero.
    """

    topology: Topology
    layout: Layout
    tokens: int
    """Tokens of the whole sequence."""
    ends: Ends = ()
    max_ctas: int = 8
    """The thread blocks (CTAs) that NCCL may use for messages."""

    @property
    def own(self) -> tuple[Own, ...]:
        """The fragments of this rank, in the order of its shard."""
        return _own(*self._sharded, self.topology.rank)

    def scan(self, *, backward: bool = False) -> Exchange:
        return scan(*self._sharded, backward=backward)

    def halo(self, reach: int) -> Exchange:
        """Return the programs of a halo of `reach` rows."""
        return halo(*self._sharded, reach=reach)

    @property
    def _sharded(self) -> tuple[Layout, int, int, int, Ends]:
        return self.layout, self.tokens, self.topology.size, self.topology.intra_size, self.ends

    def agreement(self, exchange: Callable[[], Exchange]) -> Agreement:
        """Return the agreement of the ranks; that of this rank alone if no rank exchanges.

        If this rank's exchange is illegal, other ranks may have legal documents, and wait in their exchange.
        """
        try:
            exchanges = any(exchange().programs)
        except Exception:  # the call raises it again, and tells the other ranks
            exchanges = True
        return agreement_of(self.topology) if exchanges else ALONE

    @contextmanager
    def exchanging(self, signature: Signature) -> Iterator[Transport]:
        """Agree with all ranks on an exchange and yield the transport of its messages.

        An exchange with a signature seen before goes ahead of the agreement, also with other documents.

        Raises:
            ValueError: the ranks make different calls.
            RuntimeError: a rank has gone.
        """
        topology = self.topology
        agreement = agreement_of(topology)
        with agreement.refusing():
            transport = transport_of(topology, Route(1, topology.size, direct=True), self.max_ctas)
        documents = digest(str(self.ends))
        sequence = {"layout": str(self.layout), "tokens": str(self.tokens), "documents": documents}
        kind = *signature.items(), topology.intra_size, self.max_ctas  # which have communicators of their own
        meeting = agreement.meet(Claim({**signature, **sequence}, kind=kind))
        with agreement.ring():
            transport.connect(Pass.KV)
            yield transport.labelled(meeting.label)


@lru_cache(maxsize=256)
def _own(layout: Layout, tokens: int, size: int, _: int, ends: Ends, rank: int) -> tuple[Own, ...]:
    places = {
        fragment: (number, place, len(chain) - 1)
        for number, chain in enumerate(chains(layout, tokens, size, ends))
        for place, fragment in enumerate(chain)
    }
    local = (fragment for fragment in fragments(layout, tokens, size, ends) if fragment.rank == rank)
    return tuple(Own(fragment, *places.get(fragment, (-1, 0, 0))) for fragment in local)

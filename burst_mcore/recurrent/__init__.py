"""Recurrences and short convolutions over sharded sequences: ranks exchange states and halos, not tokens.

A recurrence carries a state S along a sequence; over an interval of tokens it is an affine map S -> A S + B.
A rank computes A and B of its tokens, an exclusive scan over the ranks returns the state before them, and the
kernel runs from this state. A short convolution reads the few rows before a rank's tokens, a halo.

fragments   consecutive tokens of one document on one rank; chains of fragments
programs    the actions of an exchange, its programs of all ranks, and their bytes
scan        programs of the scan of affine maps, within nodes first, then between nodes
halo        programs of the exchange of halos
maps        affine maps by a matrix or elementwise: composed, applied, and their gradients
sequence    a sharded sequence, and the agreement of its ranks on an exchange
exchange    the execution of programs: states and halos, with their gradients
kernels     the interface of kernels, and adapters to kernels by their signatures
runs        kernel calls over a rank's fragments, and their outputs
api         recurrence and convolution, the public functions
bound       token-mixing functions of transformers' models, bound to shards
"""

from burst_mcore.recurrent.api import convolution, recurrence
from burst_mcore.recurrent.kernels import Recurrence
from burst_mcore.recurrent.sequence import Shards

__all__ = ["Recurrence", "Shards", "convolution", "recurrence"]

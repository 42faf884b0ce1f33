"""Recurrences and short convolutions over sharded sequences: states and halos rotate, tokens stay.

A recurrence carries a state S along a sequence, and over some tokens S becomes A S + B. A rank computes A and
B of its own tokens, an exclusive scan over the ranks gives each the state before its tokens, and the kernel
runs from there. A short convolution reads the few rows before a rank's tokens, a halo.

fragments   consecutive tokens of one document on one rank, and the chains that they form
programs    the actions of an exchange, its programs of all ranks, and their bytes
scan        programs of the scan of affine maps, within nodes first, then between nodes
halo        programs of the exchange of rows that a convolution reads
maps        affine maps by a matrix or elementwise: composed, applied, and their gradients
sequence    the sequence of which each rank has a shard, and how its ranks agree on an exchange
exchange    runs programs: states and halos, with their gradients
kernels     what a recurrence needs of a kernel, and adapters to kernels by their signatures
runs        the runs of a kernel over a rank's fragments, and the outputs that they make
api         recurrence and convolution, the public functions
bound       token-mixing functions of transformers' models, bound to shards
"""

from burst_mcore.recurrent.api import convolution, recurrence
from burst_mcore.recurrent.kernels import Recurrence
from burst_mcore.recurrent.sequence import Shards

__all__ = ["Recurrence", "Shards", "convolution", "recurrence"]

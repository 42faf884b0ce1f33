"""Checkpointed layers: where a sequence is cut, and which results attention saves for its recomputation.

cuts    where a sequence is cut: results of its tail are saved, its head is computed again
replay  the results of a forward, recorded, and handed to its recomputation
"""

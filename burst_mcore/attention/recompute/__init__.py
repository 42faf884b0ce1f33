"""Checkpointed layers: where a sequence is cut, and which results attention saves for its recomputation."""

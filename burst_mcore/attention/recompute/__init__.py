"""Checkpointed layers: where a sequence is cut, and what attention keeps of it for its recomputation."""

"""Batches of whole sequences, and loaders that deal them to the ranks of a sequence group."""

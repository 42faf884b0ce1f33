"""Faults in the package, which must be found, and how they get into functions that are imported."""

"""Measures attention methods side by side: one interface, a correctness gate before every clock."""

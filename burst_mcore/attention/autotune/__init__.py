"""Choosing: what a schedule costs, how long it takes when it is played, and which one is taken."""

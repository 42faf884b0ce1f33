"""Distributed attention: masks, plans, topologies, schedules, kernels, and the function made of them."""

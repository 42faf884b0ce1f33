"""The functions that patched lines of Megatron call, and rebound context-parallel groups.

The patches lie in the folder patches/ of the repository; `burst-mcore patch` writes them into a checkout.

hooks   the functions that patched lines call, and the launcher, too
groups  rebound context-parallel groups, equal in core attention, layer, model and positions
"""

"""The functions that patched lines of Megatron call, and groups that are bound anew.

The patches lie in the folder patches/ of the repository; `burst-mcore patch` writes them into a checkout.

hooks   the functions that patched lines call, and the launcher, too
groups  context-parallel groups that are bound anew: core attention, layer, model and positions agree
"""

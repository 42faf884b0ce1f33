"""Patches of Megatron's source, which add the flag to a checkout, without the launcher.

The patches lie in the folder patches/ of the repository, which an installed package has as data.

insertions  a patch as data: lines, and the place in Megatron's source for each block of lines
trees       a tree of Megatron's source: its version, whether it is patched; apply, revert, print
"""

"""Patches of Megatron's source, which give a checkout the flag by itself, without the launcher.

The patches lie in the folder patches/ of the repository, which an installed package has as data.

insertions  a patch as data: lines, and the place in Megatron's source that each block of lines goes to
trees       a tree of Megatron's source: its version, whether it is patched; apply, revert, print
"""

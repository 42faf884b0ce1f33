"""Changes to Megatron: of its source, by patches; of its functions, at run time.

The patches lie in the folder patches/ of the repository, which an installed package has as data. They give a
Megatron checkout the flag by itself, without the launcher.

insertions  a patch as data: lines, and the place in Megatron's source that each block of lines goes to
trees       a tree of Megatron's source: its version, whether it is patched; apply, revert, print
hooks       the functions that patched lines call, and the launcher, too
wrap        functions of Megatron replaced at run time, without an edit of its files
groups      context-parallel groups that are bound anew: core attention, layer, model and positions agree

Only `hooks` and `groups` need Megatron.
"""

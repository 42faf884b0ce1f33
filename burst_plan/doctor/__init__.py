"""A configuration examined before it runs: what it will do, whether it fits, and a faster way.

section     DeepSpeed's JSON in words: groups, kernel, bytes of attention, recompute
configured  DeepSpeed's JSON or Megatron's arguments: to a way, and settings of attention
review      a configured way by the model of a step: its memory, its speed, and a better one
checkup     the command `doctor`: a configuration to a review
"""

"""A configuration examined before it runs: its behaviour, its memory, and a faster plan.

section     DeepSpeed's JSON as text: groups, kernel, bytes of attention, recompute
configured  DeepSpeed's JSON or Megatron's arguments: to a plan, and settings of attention; options
review      a configured plan by the model of a step: its memory, its speed, and a better plan
checkup     the command `doctor`: a configuration to a review
"""

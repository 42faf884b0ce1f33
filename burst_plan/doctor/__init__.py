"""A configuration examined before it runs: what it will do, whether it fits, and a faster way.

section     DeepSpeed's JSON in words: groups, kernel, bytes, memory
memory      bytes of a rank under that JSON
configured  DeepSpeed's JSON or Megatron's arguments: to a way, and settings of attention
review      a configured way: its speed, its memory, and a better one
checkup     the command `doctor`: a configuration to a review
"""

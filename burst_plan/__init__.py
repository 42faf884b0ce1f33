"""burst_plan: answers before a run, and the command `burst-mcore`.

simulate    simulators of schedules on the clock of a cluster; machines: known GPUs and their links
explain     schedules and masks: predictions, dry runs, pictures, traces
step        a whole training step: its time, its memory, and the best plan to run a model
doctor      a configuration of DeepSpeed or Megatron, examined
patch       patches of Megatron's source
cli         the command; options: the options that its subcommands share
words       masks and GPUs in words, and numbers of tokens; tables: rows as wide as the terminal
provenance  the commit and the machine behind a figure; files: files that a command is to write

burst_plan imports burst_mcore, never the other way; burst_bench adds subcommands to the command.
"""

"""A whole training step, predicted: its time by part, its memory by kind, and the best plan to run a model.

model      sizes of a model (a folder): presets, a config.json, arguments of Megatron
plan        a plan of a step: parallel degrees, ZeRO, recompute, offload, loss
recurrence kernel calls, bytes and seconds of recurrences and convolutions over ranks
parts      bytes of the parts of a layer, in the order of forward
memory     bytes of a rank, as a stack
attention  attention of a layer by its schedule
time       seconds by part, exposed communication by cause
figures    tokens a second, MFU, and the timeline of a step
search     feasible plans ranked, reasons against the others, the longest sequence
advice     flags of Megatron and the JSON of DeepSpeed for a plan
planned    the command `plan`: options to a search, a search to text
"""

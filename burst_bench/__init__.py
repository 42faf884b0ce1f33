"""The bench: one runner measures methods side by side, for every subject.

subjects/     the quantities to measure: a class of cases each, with its trials, figures and bars
methods/      the methods to compare: rows of METHODS, ours and those of other packages
published/    published measurements compared with predictions, for `burst-mcore plan --against`
check/        the GPU check: claims with predictions and bars, a line each
core          the data classes of the bench; a subject extends Case
run           runs cases one by one, each in fresh processes; saves results after each
stage         in such a process: gate every method, then time methods and units in turn
gate          errors against float64
memory        peak memory, and the largest tensor
launch        fresh processes over gloo; emulate: the same on an emulated cluster
results       figures, bars, and the JSON file of a run
report        results as a table
calibrate     the rates of this machine, measured, for `burst-mcore calibrate`
trace         times of ranks' actions: record, and `burst-mcore draw --measure`
"""

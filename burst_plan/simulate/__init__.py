"""Simulators of schedules on the clock of a cluster, and the search for the best candidate: predictions.

cost           bytes and FLOPs of a pass, seconds of kernel calls
play           a schedule against time, rank by rank
lockstep       the same for ranks with the same program; counted: rows of each message, for all ranks
costing        the costs of candidates, by simulation
search         which candidates are simulated, and in which order; the candidate that a call takes
reason         why a candidate is the best, as text
walk           advances the programs of all ranks, for dry runs and the simulator
trace          events of a run, recorded or simulated
"""

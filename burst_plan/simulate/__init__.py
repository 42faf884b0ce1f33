"""Simulators of schedules on the clock of a cluster, and the search for the best way: all is predicted.

cost           bytes and FLOPs of a pass, seconds of kernel calls
play           a schedule against time, rank by rank
lockstep       the same for ranks that do alike; counted: the rows that each hop carries, for all ranks
costing        the costs of ways, by simulation
search         which ways are simulated, and in which order; the way that a call takes
reason         why a way is the best, in words
walk           advances the programs of all ranks, for dry runs and the simulator
trace          events of a run, recorded or simulated
"""

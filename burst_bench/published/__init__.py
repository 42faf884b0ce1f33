"""Predictions compared with measurements: the field's methods on the clock of the cost model.

rows      rows of measurements, their checks, and how `bench attention` records them
methods   the field's methods, each by its schedule
loops     the messages and bytes of other projects' rings
against   measured and predicted side by side: two numbers of a machine that are fitted, errors, regret
training  published training steps, each by the step model
"""

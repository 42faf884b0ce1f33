"""Predictions beside measurements: the field's methods on the clock of the cost model.

rows      rows of measurements, their checks, and how `bench attention` records them
methods   the field's methods, each by the schedule that it runs
loops     the messages and bytes of other projects' rings
fit       two numbers of a machine, fitted to rows
against   measured and predicted side by side: errors and regret
training  published training steps, each by the step model
"""

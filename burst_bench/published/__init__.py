"""Predictions beside measurements: the field's methods on the clock of the cost model.

rows      rows of published measurements, and their checks
paper     the figures in a file of a paper's results
methods   the field's methods, each by the schedule that it runs
fit       two numbers of a machine, and the constants of all, fitted to rows
against   measured and predicted side by side: errors and regret
training  published training steps, each by the step model
"""

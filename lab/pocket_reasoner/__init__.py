"""A small model that reasons in steps, trained from scratch, and the study made with it.

problems.py makes the problems and keeps the splits apart; train.py makes the model; study.py makes
the table of docs/accuracy.md; show.py lets the model solve problems on the terminal.
"""

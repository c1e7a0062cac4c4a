"""What a model's token entropies look like, and what quantisation does to them.

`dump` and `measure` hold and make the records of single tokens; each study turns records into a
`study.Study`, which `figures` draws. `reset.cli.analyze` is the command; docs/analysis.md says how
to read the results.
"""

"""Trials of verdicts: many comparisons with a known correct verdict, from few engine starts.

`trial.py` defines a trial and their summary, `driver.py` runs trials, and `folder.py` stores them.
`python -m patcher.bench.lab.trials.verdict_trials OUT` does all of it on a GPU host.
"""

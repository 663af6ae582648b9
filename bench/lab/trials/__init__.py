"""Do verdicts hold on this machine? Many trials of patches whose right verdict is known, from few
starts of the engine: `trial.py` what one is and what many say, `driver.py` takes them, `folder.py`
keeps them, and
`python -m patcher.bench.lab.trials.verdict_trials OUT` does all of it on a GPU host."""

"""Is the whole model faster with the patch, and still the same model?

`options.py` turns the command line into the job of `job.py`. `compare.py` measures patches that are
installed together: in one process (`one_process.py`), or in blocks of processes (`session.py`),
where an arm is a process that is patched as it starts (`arm.py`). `decision.py` is the rule,
`verdict.py` applies it to a measurement, `set_search.py` finds the best of several patches.
"""

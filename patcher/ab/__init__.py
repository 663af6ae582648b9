"""Is the whole model faster with the patch, and still the same model?

`options.py` is what a person asked for and `job.py` what is measured. `compare.py` measures patches
that are in together: in one process (`one_process.py`), or in blocks of processes (`session.py`),
where an arm is a process that is patched as it starts (`arm.py`). `decision.py` is the rule,
`verdict.py` applies it to what was measured, `set_search.py` finds the best of several patches.
"""

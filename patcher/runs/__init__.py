"""A run: a folder, and a fold over its journal. `run.py` does a step once, `journal.py` and
`durable.py` keep it through a kill, `machine.py` says whether it is still the same machine, and
`stopping.py` ends a command so that it can be resumed."""

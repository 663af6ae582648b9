"""The agent loop as a stage of a run (`stage.py`): how it searches (`searching.py`), what it would
take (`estimate.py`), and what comes in from outside the loop: the user's levers and scores
(`levers.py`, `scoring.py`) and the memory of earlier runs (`remembered.py`), carried in by
`carried.py`. `recording.py` keeps a finished loop so that it comes to the same end again."""

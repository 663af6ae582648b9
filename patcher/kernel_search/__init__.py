"""The search for a better kernel of one op, as a stage of a run (`stage.py`): what it would take
(`estimate.py`), what the user and earlier runs give it (`context.py`, `memory.py`), and a finished
one as a folder that comes to the same end again (`recording.py`)."""

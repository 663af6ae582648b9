"""What a user adds to a run by its settings: text, sources and rules for prompts (`record.py`), and
a score of their own (`scoring.py`)."""

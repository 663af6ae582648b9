"""Between the loop and a language model: what the agents read (`rendering.py` over `templates/`,
what others wrote fenced by `quoting.py`, all cut to fit by `room.py`) and what is taken out of a
reply (`extract.py`). Nothing here asks a model."""

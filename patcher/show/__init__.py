"""Tables and lines for people, by what they show. A command prints through here and never in two
ways; what it prints with `--json` is the record itself. `watching.py` is the table of a run at
work."""

"""The command line: a file for each command, or for a close family named as the family.

`index.py` lists them, `console.py` has what all of them share: the app, its options, its output.
What is heavy is imported inside a command, so that every other one starts at once.
"""

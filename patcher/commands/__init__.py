"""The command line, one file for commands that belong together; importing a file registers them.
`console.py` has what all share: the app, its options, its output. What is heavy is imported inside
a command, so that every other one starts at once."""

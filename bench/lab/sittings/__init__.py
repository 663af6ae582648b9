"""Many agent loops whose candidates are judged in sittings: on a host that is lent for minutes,
without network. README.md goes through the commands.

`loops.py` starts and resumes loops, `frozen.py` keeps the code that they began with, `travel.py`
packs for a sitting and takes in what came back, `keeping.py` makes one file of unfinished loops.
On the host, `sitting.sh` unpacks and `sit.py` has workers judge.
"""

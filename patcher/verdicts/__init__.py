"""Accept, reject or inconclusive: the rule's verdict and its reasons (`decide.py`), and beside it a
person's word (`word.py`, `review.py`), which never overwrites it."""

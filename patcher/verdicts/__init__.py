"""A person's verdict on a patch (`human_verdict.py`, `review.py`), beside the rule's in
`patcher.ab`, which it never overwrites."""

"""Is the whole model faster with the patch, and still the same model? `throughput_job.py` is what a
person asked, `measured.py` a job and what came of it, `measure.py` the sitting in a process of its
own. An arm is a process where the engine is patched as it starts (`arm.py`, paired in `pairs.py`).
Other batch sizes and contexts are `other_traffic.py`, the rule's word is `judging.py`, the best of
several patches `sets.py`."""

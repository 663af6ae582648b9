"""One account held against another. Does the kernels' own gain explain the whole model's
(`reconcile.py`: launches times what a call saves, rows that moved)? Did the device run what the
receipts claim (`proof.py`; for every patch point of vLLM, on a GPU, `vllm_points.py`)?"""

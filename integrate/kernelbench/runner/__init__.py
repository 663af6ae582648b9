"""Trace a KernelBench problem; run in the sandbox, where it imports torch and nothing of ours.

`python -P -m patcher_trace.script problem.py trace.json` builds the module, exports its graph with
every size as free as the module allows, and writes names, shapes, dtypes, samples' ranges and the
graph as JSON. The file's code runs in this process, so whoever reads the JSON must distrust it.
"""

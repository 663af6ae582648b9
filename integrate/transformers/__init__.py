"""Patch points in Hugging Face transformers: of gpt-oss, and of the norms of any model.

They work eagerly, or compiled with a static cache. A patch point patches an existing model by
replacing forwards of its modules. Without a model, one of gpt-oss patches every model built
afterwards: by the constructor of its body, or by transformers' registry of experts functions.
"""

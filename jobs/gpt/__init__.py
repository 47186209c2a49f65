"""A byte-level GPT on the text of Python's own standard library; see job.py."""

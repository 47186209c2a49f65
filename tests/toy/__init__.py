"""A training job on toy data, with switches for what can go wrong; sample i carries the value i."""

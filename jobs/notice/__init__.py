"""Handwritten digits, the job that needs nothing: the images come with scikit-learn."""

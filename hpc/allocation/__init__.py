"""What runs in the batch step: one controller per allocation. Never imports torch."""

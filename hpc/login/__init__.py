"""What runs on the login node. Never imports torch."""

"""The training job of `sbin/bench recover`: a tiny model whose step mostly sleeps, as one that waits for a GPU does."""

"""The training job of the fault matrix: tiny, exactly repeatable, and with a diary of what each rank did."""

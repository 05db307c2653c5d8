"""Performance figures, each a median of several runs and a ratio taken in the same run where there is a rival."""

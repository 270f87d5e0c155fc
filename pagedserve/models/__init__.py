"""What a model is and where its files are. Read by both planes; never imports numba."""

"""PagedServe: a server for language models on ordinary CPUs."""

__version__ = "0.1.0"

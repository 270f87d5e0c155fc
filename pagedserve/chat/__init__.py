"""`pagedserve chat`: a conversation on the terminal. A client like any other."""

"""The deciding process: the pure scheduler core, and the service that connects it to sockets."""

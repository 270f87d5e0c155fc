"""What the deciding plane (pagedserve) and the computing plane (workers) share: errors, messages, segments."""

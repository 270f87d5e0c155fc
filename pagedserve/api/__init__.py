"""The HTTP door: OpenAI's API, the chat page and metrics. One more client of the scheduler; it makes no text itself."""

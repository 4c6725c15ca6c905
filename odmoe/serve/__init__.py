"""The HTTP service: the OpenAI API on a model of `odmoe.api`."""

"""The model of a server with the OpenAI API."""

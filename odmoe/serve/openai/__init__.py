"""The OpenAI API: what requests ask for, and how responses are written."""

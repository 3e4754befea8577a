"""OpenAI's Responses API, with its state in the yard's broker."""

"""Other protocols than OpenAI's: each translates its requests into ChatFields, and answers into shapes of its own.

Validation, prompts, jobs and responses are those of chat completions.
"""

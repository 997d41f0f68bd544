"""Answers of a wanted form: a JSON schema or calls of tools as a grammar, and the tokens that it allows next.

schema (what can be enforced) -> lark (the grammar's text) -> grammars (compiled in turn, and kept) -> matcher (followed
token by token). confined talks to the processes in which llguidance works (process). The room imports nothing else of
edgemoe than errors and storage; llguidance comes with the extra `serve`, and only the processes import it.
"""

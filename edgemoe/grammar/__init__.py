"""Answers of a wanted form: a JSON schema or calls of tools as a grammar, and the tokens that it allows next.

schema (what can be enforced) -> lark (the grammar's text) -> matcher (compiled, and followed token by token). The room
imports nothing else of edgemoe; llguidance comes with the extra `serve`, and is imported when a grammar is compiled.
"""

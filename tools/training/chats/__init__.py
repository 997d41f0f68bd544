"""Lessons of the demo model next to its tasks: small talk, honest refusals, and how people type.

small_talk.py   greetings, thanks and questions about the demo itself, each with its answer
outside.py      questions outside the demo's tasks, and the refusal that names what it knows
subjects.py     the subjects of these questions
wordings.py     further wordings of the tasks
phrasing.py     a question as people type it: lower case, no punctuation, line breaks
"""

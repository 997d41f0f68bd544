"""Pictures: their bytes, their tokens, and the vision tower of a model.

forms.py    families whose pictures are understood, and the bounds of their vision_config
sizes.py    bytes that a tower and a picture take, for a memory plan
reader.py   checks a picture's bytes, and makes of them what a tower takes
tower.py    transformers' own vision modules over the store's tensors
prompt.py   puts pictures into a prompt's tokens
"""

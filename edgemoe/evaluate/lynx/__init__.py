"""Studies of remapped experts (Lynx), in addition to the settings that --lynx offers.

rules.py   which experts a step's tokens take: agreement with a part of its freedom, and resident experts first
phases.py  windows whose prompt, whose new tokens, or both agree
chats.py   chat tasks answered several at once
cached.py  one setting with a cache that holds a part of the experts, token by token
"""

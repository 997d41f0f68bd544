"""The options with which a model is opened, declared once, and the settings made of them."""

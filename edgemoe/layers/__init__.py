"""The dense part of a model: attention, routers, norms and linear layers."""

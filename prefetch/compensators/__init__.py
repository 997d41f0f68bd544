"""How compensators come into memory: in the requests of their experts, into a tier of their own."""

"""The commands: one module each, with the options they share and the configuration file."""

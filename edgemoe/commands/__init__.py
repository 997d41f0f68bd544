"""One module a command, the options that commands share, and the configuration file."""

"""The commands, a file for each group of them. Each parses first and imports what it needs after."""

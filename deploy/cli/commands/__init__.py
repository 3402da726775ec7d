"""The commands, in a file for each group. Each command parses its arguments first and imports what it needs
afterwards."""

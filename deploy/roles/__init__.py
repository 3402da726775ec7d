"""What each process does, in which order it opens what it needs, and how it ends."""

"""A user's recipe: its keys and limits, its checks, and the packages that it needs."""

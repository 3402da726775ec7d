"""The learner feeds prompts, takes the groups that workers made of them, and logs, replays or rewinds what it
trains."""

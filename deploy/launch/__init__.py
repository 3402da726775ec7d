"""Processes on one machine: started, watched, restarted and stopped."""

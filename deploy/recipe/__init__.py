"""What a user asks for: recipes, their keys and limits, and what they need installed."""

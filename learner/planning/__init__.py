"""Estimates the memory that a recipe takes, before any process starts."""

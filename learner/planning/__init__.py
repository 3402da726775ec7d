"""How much memory a recipe takes, before anything is started."""

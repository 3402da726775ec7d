"""A worker's side: one version after the other, broadcast or pulled, checked and delivered."""

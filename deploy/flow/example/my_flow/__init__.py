"""A training flow of our own: what is asked, how answers are judged, and how the model learns from them."""

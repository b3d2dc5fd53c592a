"""What is trusted, and why: the recorded runs, and what a model has to be for them to speak of it."""

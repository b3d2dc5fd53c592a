"""Ways of training on several processes, each against stock code on one that runs the same
documents alone."""

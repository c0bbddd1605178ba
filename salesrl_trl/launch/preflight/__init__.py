"""Can this run work? Stages in order of cost. A run passes the same ones, up to the one that loads the model."""

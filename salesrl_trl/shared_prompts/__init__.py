"""A group's prompt goes through the model once, and each of its completions behind it.

Owns the way from TRL's padded batch to one row of real tokens and back: the row (`layout`), the attention over it
(`attention`, `flash`), the models that can (`support`), the pass (`passes`), and one pass for several micro-batches
(`ahead`). Refuses to compute a loss and to project hidden states: TRL's own head does that.
"""

"""A group's prompt goes through the model once, and each of its completions behind it. TRL's own head gives log-probs.

- `row_layout`: from TRL's padded batch to one row of real tokens, and back.
- `shared_attention`: the attention over this row, and the models that can do it.
- `shared_passes`: the pass over a batch.
"""

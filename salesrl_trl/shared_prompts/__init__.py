"""A group's prompt goes through the model once, and each of its completions behind it.

- `row_layout`: from TRL's padded batch to one row of real tokens, and back.
- `shared_attention`, `flash`: the attention over this row.
- `support`: the models that can do it.
- `shared_passes`, `ahead`: the pass over a batch, and one pass for several micro-batches.

Refuses to compute a loss and to project hidden states: TRL's own head does that. The trainer calls `shared_passes` and
`ahead` in place of TRL's method for log-probs.
"""

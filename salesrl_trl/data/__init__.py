"""From a dataset's row to a `SalesRow` and its chat prompt.

Owns sources, columns, templates and the lengths of prompts. Refuses to know services, rewards or a model.
"""

"""From a file's record to a `SalesRow` and its chat prompt.

Owns sources, formats, columns, templates and the lengths of prompts. Refuses to know services, rewards or a model.
"""

"""From a file's record to a `SalesRow` and its chat prompt.

- `sources`: loads records and makes the dataset for TRL. It uses all others here.
- `files`: files of records, of text and of a knowledge base.
- `form`, `columns`, `formats`: from records of any form to this package's columns.
- `rows`, `pictures`, `branches`: from columns to a checked row.
- `templates`, `lengths`, `processor`: the row's prompt, its length, and its pictures.

Refuses to know services, rewards or a model. The checks before a run (`build`) call it.
"""

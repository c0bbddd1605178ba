"""What the policy wrote, what the services answered and what it earned, for every completion of a run.

- `schema`: the record's tables; `completion_record`: what happened on a completion's way;
- `writer`: the file that grows beside training; `reader`: the way back from it.

Refuses to know rewards, rollouts and trainers: those hand in plain values. Imports the standard library alone, so that
pages and tools read a record without torch.
"""

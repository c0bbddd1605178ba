"""What the policy wrote, what the services answered and what it earned, for every completion of a run.

Owns the record's tables (`schema`), what happened on a completion's way (`completion_record`), the file that grows
beside training (`writer`) and the way back from it (`reader`). Refuses to know rewards, rollouts and trainers: those hand in plain
values. Imports the standard library alone, so that pages and tools read a record without torch.
"""

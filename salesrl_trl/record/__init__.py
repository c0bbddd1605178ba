"""What the policy wrote, what the services answered and what it earned, for every completion of a run.

Refuses to know rewards, rollouts and trainers: those hand in plain values. Imports the standard library alone, so that
pages and tools read a record without torch.
"""

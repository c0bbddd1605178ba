"""Records every completion of a run: the policy's text, the services' answers, and the reward.

Independent of rewards, rollouts and trainers, which pass plain values. Imports only the standard library, so that
pages and tools read records without torch.
"""

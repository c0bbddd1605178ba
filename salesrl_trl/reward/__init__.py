"""From a completion's text to its reward: the packaged chain, functions of a user's own, a record in their place.

Its packages ask the services: `service`, `judge`. `reward_loop` is the trainer's side, `figures` those of a log line.
Refuses to know the policy, its tokens and the schedule.
"""

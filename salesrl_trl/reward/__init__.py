"""From a completion's text to its reward.

Owns:
- one completion: `parsing`, the order of the stages (`chain`), a stage of your own (`stage`), the times of all stages
  (`stage_times`), the number (`scoring`);
- a batch: rewards while they come in (`batch`, `open_batches`), any reward (`base`), the trainer's side (`desk`);
- answers that are kept (`cache`);
- the reward in a process of its own (`remote`, `worker`);
- the first question to every service (`warm_up`, `readiness`), and the figures of a log line (`figures`).

Its packages ask the services: `service`, `rag`, `judge`. Refuses to know the policy, its tokens and the schedule.
"""

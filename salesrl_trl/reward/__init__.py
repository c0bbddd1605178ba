"""From a completion's text to its reward.

Owns:
- one completion: `parsing`, the order of the stages (`chain`), a stage of your own (`stage`), the times of all stages
  (`stage_times`), the number (`scoring`), the lines of the log (`sample_lines`);
- any reward: its interface of six methods (`scorer`), functions of a user's own (`functions`), several as one
  (`mixed`), a record in its place (`replay`);
- a batch: rewards while they come in (`batch`), and the trainer's side, which owns the open batches (`reward_loop`,
  `reward_funcs`, `watched_loop`);
- answers that are kept (`cache`), those of a RAG service (`rag_answers`, `rag_client`);
- the reward in a process of its own (`remote`, `worker`);
- the figures of a log line (`figures`).

Its packages ask the services: `service`, `judge`. Refuses to know the policy, its tokens and the schedule.
"""

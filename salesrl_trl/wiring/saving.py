"""Saving and pushing: overrides of transformers' methods, with the package's own files."""

import functools
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import transformers.trainer as transformers_trainer
from transformers.trainer_utils import HubStrategy
from transformers.utils import PushInProgress
from trl import GRPOTrainer

from salesrl_trl.checkpoint.keeper import Batches, fitted
from salesrl_trl.checkpoint.run_files import may_write_card, one_policy, staged, unstaged
from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.names import SAVING_FOLDER
from salesrl_trl.telemetry.logs import spared
from salesrl_trl.wiring.components import Components


class SavingTrainer(GRPOTrainer):
    args: SalesGRPOConfig
    components: Components
    _buffered_inputs: Batches | None
    push_in_progress: PushInProgress | None = None

    def _save_checkpoint(self, model: object, trial: object) -> None:
        """Saves to a temporary folder, moves the finished checkpoint into place, and then pushes it."""
        with self.components.stopping.held():
            write = functools.partial(super()._save_checkpoint, model, trial)
            folder = self.components.keeper.save(self.state, write)
            if folder is not None and self.args.push_to_hub and self.is_world_process_zero():
                with spared("the hub"):
                    self._push_from_checkpoint(str(folder))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes a checkpoint that is in place, in the background."""
        args, folder = self.args, Path(checkpoint_folder)
        jobs = [] if self.push_in_progress is None else self.push_in_progress.jobs
        under_way = [job for job in jobs if not job.done()]
        is_due = args.hub_strategy != HubStrategy.END and (args.hub_always_push or not under_way)
        if is_due and folder.parent.name != SAVING_FOLDER:
            names = {HubStrategy.CHECKPOINT: "last-checkpoint", HubStrategy.ALL_CHECKPOINTS: folder.name}
            message = f"Training in progress, step {self.state.global_step}"
            upload = self._upload(folder, message, names.get(args.hub_strategy))
            self.push_in_progress = PushInProgress([*under_way, upload])

    def push_to_hub(
        self, commit_message: str = "End of training", blocking: bool = True, token: str | None = None,
        revision: str | None = None, private: bool | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Pushes only the policy and its card from the run's folder. `private`: of a repository that is created."""
        if private is not None:
            self.args.hub_private_repo = private
        self.save_model(_internal_call=True)
        if self.is_world_process_zero():
            if self.hub_model_id is None:
                self.init_hf_repo(token)
            self.create_model_card(**kwargs)
            self._finish_current_push()
            upload = self._upload(Path(self.args.output_dir), commit_message, None, token, revision)
            return upload.result() if blocking else upload

    def _upload(
        self, policy: Path, message: str, inside: str | None, token: str | None = None, revision: str | None = None
    ) -> Future[object]:
        args = self.args
        self.callback_handler.on_push_begin(args, self.state, self.control)
        place = staged(policy, Path(args.output_dir), inside)
        upload: Future[object] = transformers_trainer.hf_api().upload_folder(
            repo_id=self.hub_model_id, folder_path=str(place), commit_message=message, run_as_future=True,
            token=token or args.hub_token, revision=revision or args.hub_revision,
        )  # fmt: skip
        upload.add_done_callback(functools.partial(unstaged, place))
        return upload

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Writes our card instead of TRL's, but not next to a checkpoint that is being written."""
        folder = Path(self.args.output_dir)
        folder = folder.parent if folder.name == SAVING_FOLDER else folder
        if self.is_world_process_zero() and may_write_card(folder):
            given = {"name": model_name, "dataset": dataset_name, "tags": [tags] if isinstance(tags, str) else tags}
            self._policy_is_saved(folder, **given)

    def _policy_is_saved(self, folder: Path, **given: object) -> None:
        for part in self.components.parts:
            part.on_policy_saved(folder, self.state, given)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, object] | None = None) -> None:
        """Leaves exactly one policy in the folder, with its card. Transformers 5.24 calls it on every rank."""
        if not self.args.should_save:
            super()._save(output_dir, state_dict)
            return
        folder = Path(output_dir or self.args.output_dir)
        has_room = may_write_card(folder)  # before peft writes its own
        is_adapter = self.components.reference.has_adapter
        with one_policy(folder, self.components.policy.model.name_or_path, is_adapter=is_adapter):
            super()._save(output_dir, state_dict)
        if has_room:
            self._policy_is_saved(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        at = (self.state.global_step, self._step)
        self.components.keeper.add_parts(Path(output_dir), *at, self._buffered_inputs or [])

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads the package's own files, and the parts of the others that fit this run's settings."""
        with fitted(self.optimizer, self.lr_scheduler, self.state.global_step):
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._buffered_inputs = self.components.keeper.load_parts(Path(checkpoint), self._step)

"""What our overrides rely on upstream, pinned: an upgrade that moves one of these says here what to look at.

A failure is no bug by itself. Read the method's change upstream, check the override named beside it, then put the new
hash here: beside the old one where setup.cfg allows releases with either and the override works with both.
"""

import ast
import hashlib
import inspect
import textwrap

import pytest
import trl.trainer.grpo_trainer as grpo_trainer
import trl.trainer.utils as trl_utils
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from torch.distributed import FileStore, PrefixStore, distributed_c10d
from transformers import Trainer, TrainerControl
from transformers.trainer_callback import CallbackHandler
from trl import GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.utils import RepeatSampler
from vllm import LLM
from vllm.model_executor.model_loader.reload import layerwise
from vllm.platforms.interface import Platform


def source_hash(function):
    """Of the code alone: comments, docstrings and layout may change."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:12]


PINS = {
    # SalesGRPOTrainer._get_train_sampler wraps a RepeatSampler with `shuffle`, `seed` and `generator`
    (GRPOTrainer, "_get_train_sampler"): "1b25d1c0176a",
    (RepeatSampler, "__init__"): "651e315e504b",
    (RepeatSampler, "__iter__"): "24eef237dca8",
    # SalesGRPOTrainer._calculate_rewards: one call per batch, NaN for None, gathered over ranks at the end
    (GRPOTrainer, "_calculate_rewards"): "a30f2929443b",
    # SalesGRPOTrainer._generate_and_score_completions: keys completion_mask and advantages; NaN reward -> advantage 0
    (GRPOTrainer, "_generate_and_score_completions"): "739def7da67c",
    # a zero completion_mask gives a zero loss under every loss_type
    (GRPOTrainer, "_compute_loss"): "6b861df63f5a",
    # SalesGRPOTrainer._get_per_token_logps_and_entropies: log-probs come first, and come from the one policy forward
    (GRPOTrainer, "_get_per_token_logps_and_entropies"): "31bbe58ca8ba",
    # shared_prompts.passes: the head takes `shift_labels`, hands everything else on to the model, gives 0 where a
    # label is -100, and calls mixtral's `load_balancing_loss_func` with the attention mask last
    (trl_utils, "add_fused_lm_head"): "27301e73e4ac",
    # SalesGRPOTrainer._init_training_state: returns epochs and micro-steps of the epoch that were trained on
    # (the second: transformers before 5.17, which does not look whether the best checkpoint is still there)
    (Trainer, "_init_training_state"): ("aafbced9c7ae", "9986c17d68d8"),
    # SalesGRPOTrainer._save_checkpoint: they write to `args.output_dir` alone, by `_get_output_dir`, and rotate there
    (Trainer, "_save_checkpoint"): "3f08503719cd",
    (Trainer, "_get_output_dir"): "e1ca23af5cd3",
    # SalesGRPOTrainer's own pushes take their place: what they save, upload and wait for. `save_model` writes by
    # `_save`, then pushes by `push_to_hub` (the second: transformers 5.24, where `push_to_hub` takes `private`, and
    # `_save` is called on every rank)
    (Trainer, "push_to_hub"): ("85413c220100", "725529267e92"),
    (Trainer, "_push_from_checkpoint"): ("ed6d3c77b55d", "fc40ece078cb"),
    (Trainer, "save_model"): ("c1cd4cf91d54", "0ea4ba18a261"),
    (Trainer, "_save"): ("1b29ac105f01", "f7a85de8fe2a"),
    (GRPOTrainer, "create_model_card"): "2845ed823c4d",
    # SalesGRPOTrainer's KL state lies beside what these two write and read
    (Trainer, "_save_optimizer_and_scheduler"): "99a0de2f2453",
    (GRPOTrainer, "_load_optimizer_and_scheduler"): "f0236c69fcf3",
    # the buffered batch is reused for steps_per_generation x num_iterations
    (GRPOTrainer, "_prepare_inputs"): "b6f38f7a05aa",
    # self._metrics[mode] is averaged, NaN -> None, and cleared
    (GRPOTrainer, "log"): "c4d4db52f9ef",
    # weights are pushed when global_step moved, before generating
    (GRPOTrainer, "_generate_single_turn"): "7e2f21bdaf91",
    # SalesGRPOTrainer._ask_server: what it returns are that method's first arguments; it may change the prompts.
    # data.lengths.token_counter tokenizes as it does
    (GRPOTrainer, "_tokenize_prompts"): "f0e7e168ffd6",
    # _OneConversation.talk: runs it for one conversation on a copy of the trainer's attributes; what it uses of them
    (GRPOTrainer, "_tool_call_loop"): "ba4ef3a633e2",
    # SalesGRPOTrainer._get_tool_suffix_ids: its messages are those of the completions
    (GRPOTrainer, "_get_tool_suffix_ids"): "143d703a93fd",
    # guard_parser: the tokenizer's method is called, and a ValueError of it makes the turn plain text
    (grpo_trainer, "parse_response"): "40eb8ff6cff7",
    # SalesVLLMGeneration: builds `LLM` from the module's global
    (VLLMGeneration, "_init_vllm"): "90ee5e82844d",
    # SalesVLLMGeneration.sync_weights replaces the colocate branch
    (VLLMGeneration, "sync_weights"): "9c4671d678ef",
    # merged_beside: with an adapter they read `model.named_parameters()` between `merge_adapter` and
    # `unmerge_adapter`, and nothing else of the model but `parameters()` before; they take ".base_layer" off names
    (VLLMGeneration, "_iter_named_params"): "6d5a7763acd5",
    (VLLMGeneration, "_iter_fsdp2_params"): "220255536cae",
    # the phases of a step: what each of these holds, and that the optimizer steps between the last training_step and
    # on_step_end (in `backward` under DeepSpeed)
    (GRPOTrainer, "_generate"): "c43183674d09",
    (GRPOTrainer, "training_step"): "96c133253ca1",
    (GRPOTrainer, "_save_checkpoint"): "96c508fc0fca",
    # (the second: transformers before 5.14, which does not clear a cache of Apple's GPUs; the third: 5.23, where a
    # trainer may say itself that its loss is scaled)
    (Trainer, "training_step"): ("285b156bfe97", "52732193c195", "4af68cc5a846"),
    (Trainer, "get_batch_samples"): "ce1d3f8e633c",
    (Trainer, "evaluate"): "3f3b306bcfa5",
    (Accelerator, "backward"): "79c32c236a8b",
    # a quick evaluation comes after a step's log, evaluation and checkpoint; called once more at an epoch's end
    (Trainer, "_maybe_log_save_evaluate"): "c3945a2525b7",
    # on_pre_optimizer_step comes after clipping and before optimizer.step
    # (the second: transformers before 5.17, which does not tell the batch sampler its epoch; OrderByEpoch has its own;
    # the third: 5.23, which holds back the reduction of gradients of a policy that was sharded while it was loaded)
    (Trainer, "_run_epoch"): ("de4852a9dfd7", "1831da9fe3f8", "28066199eba1"),
    # Pipeline.next_update: the next epoch's iterator is made while this one's is in use, and an
    # epoch's order and draws are taken when its first batch is asked for
    (DataLoaderShard, "__iter__"): "f6a0dc946182",
    # pack_tied_weights_again: a layer that can load is passed over at the beginning, and packed at the end if it got
    # no weight and has no tensors to put back
    (layerwise, "initialize_layerwise_reload"): "9bf7859b976e",
    (layerwise, "finalize_layerwise_processing"): "8a0602eae9a7",
    # SalesVLLMGeneration.streamed: one `LLM.generate` for all of a batch's prompts, in their order, under tensor
    # parallelism those of all ranks of a group, one after another
    (VLLMGeneration, "generate"): "bfb7d69cfa94",
    # ... or, of a server, one `vllm_client.generate` by keywords; what it returns has a list's entry for each
    # completion, and for each prompt under "prompt_ids". Before it all prompts are gathered by the module's
    # `gather_object`, after it completions are handed out by `broadcast_object_list`; of `accelerator` two attributes
    # are read
    (VLLMClient, "generate"): "0af0aaf71253",
    # generation.turns.ServerLabels: `generate` posts once by `_post`, with `json` by keyword, and reads `choices`
    (VLLMClient, "_post"): "47ecd265bf46",
    (VLLMClient, "_generate_from_features"): "4f1f07d803db",
    # ... and a colocated engine adds a request for each prompt, in order, through `llm_engine.add_request`, each with
    # an id of its own (the second: vLLM 0.32, where `priority` may be one number)
    (LLM, "generate"): ("a487fe76dc2f", "2164eba66738"),
    (LLM, "_run_completion"): ("5f0d68ef3f37", "0f062529a11c"),
    (LLM, "_add_completion_requests"): ("7606400c1ba4", "a7e106536528"),
    (LLM, "_render_and_add_requests"): "bfb35dce6df8",
    (LLM, "_add_request"): "3547a8ba7bd5",
    # ... and then calls `llm_engine.step` until none is left; outputs are in the order of those ids
    (LLM, "_run_engine"): "261f59f51fbd",
}


@pytest.mark.parametrize(("owner", "name"), PINS, ids=lambda value: getattr(value, "__name__", value))
def test_an_upstream_method_that_an_override_relies_on_has_not_changed(owner, name):
    function = inspect.unwrap(getattr(owner, name))
    pinned = PINS[owner, name]
    assert source_hash(function) in (pinned if isinstance(pinned, tuple) else (pinned,))


def test_the_setting_beta_is_read_only_while_the_trainer_is_built():
    uses = inspect.getsource(GRPOTrainer).count("args.beta")
    assert uses == inspect.getsource(GRPOTrainer.__init__).count("args.beta") > 0


def test_the_reference_model_has_the_policys_number_format():
    """`launch.memory_estimate` counts its bytes so, and a KL between two formats would not begin at 0."""
    assert 'model_init_kwargs.setdefault("dtype", self.model.dtype)' in inspect.getsource(GRPOTrainer.__init__)


def test_an_entry_of_the_log_takes_back_that_one_is_due():
    """`WeightChange` puts it back after an entry of its own."""
    control = TrainerControl(should_log=True)
    CallbackHandler([], None, None, None, None).on_log(None, None, control, {})
    assert not control.should_log


def test_the_trainer_builds_its_generation_from_a_module_global():
    assert "VLLMGeneration(" in inspect.getsource(GRPOTrainer.__init__)
    assert grpo_trainer.VLLMGeneration is VLLMGeneration


def test_nothing_of_an_epoch_happens_before_its_first_batch_is_asked_for():
    """The pipeline makes the next epoch's iterator early: neither a sampler nor a generator may be touched by that."""
    pulled = []

    class Watched(list):
        def __getitem__(self, index):
            pulled.append(index)
            return super().__getitem__(index)

    epoch = iter(DataLoaderShard(Watched(range(3)), rng_types=None))
    assert pulled == []
    next(epoch)
    assert pulled[0] == 0


def test_vllm_keeps_one_pool_for_the_graphs_of_all_engines_by_this_name():
    """`launch.evaluate.answering` forgets it between two policies."""
    assert "_global_graph_pool" in vars(Platform)
    assert "_global_graph_pool" in inspect.getsource(Platform.get_global_graph_pool)


def test_trl_loads_a_policy_by_a_name_that_can_be_replaced_in_its_module():
    """`policy.Policy.building` sees it before TRL puts an adapter on it, and gives TRL the reference's device."""
    assert grpo_trainer.create_model_from_path.__module__ == "trl.trainer.utils"
    loads = [
        line for line in inspect.getsource(GRPOTrainer.__init__).splitlines() if "create_model_from_path(" in line
    ]
    assert len(loads) == 2  # the policy, then the reference


def test_the_store_by_which_processes_found_each_other_can_be_asked_for(tmp_path):
    """`stopping.Stopping.watched`."""
    store = PrefixStore("default_pg", FileStore(str(tmp_path / "store"), 1))
    assert inspect.signature(distributed_c10d._get_default_store).parameters == {}
    clone = store.clone()
    assert not clone.check(["key"])
    store.set("key", "word")
    assert clone.check(["key"])
    assert clone.get("key") == b"word"

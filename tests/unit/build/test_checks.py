"""Checks of the outside world, before any model is loaded."""

import re
import threading
import traceback
from pathlib import Path

import pytest
from transformers import Qwen2Config
from werkzeug import Response

from salesrl_trl.config import SalesGRPOConfig
from salesrl_trl.errors import ConfigError, ModelNotFoundError, ServiceRejected, ServiceUnavailable
from salesrl_trl.launch.checks.addresses import check_models, check_rag, check_vllm_server
from salesrl_trl.launch.checks.dataset import prompt_limit
from salesrl_trl.launch.checks.model import check_model, load_tokenizer, positions_of
from salesrl_trl.launch.checks.reward import read_key
from salesrl_trl.launch.plan import Plan
from salesrl_trl.launch.recipes import RECIPES
from salesrl_trl.launch.settings import parse
from salesrl_trl.service.http import HttpClient


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("salesrl_trl", r"a folder without config\.json"),
        ("nobody/no-such-model", "whose configuration could not be loaded"),
    ],
)
def test_a_model_that_is_not_there_is_refused(name, message, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[3])
    with pytest.raises(ModelNotFoundError, match=message):
        check_model(name, None, False)


def test_a_folder_with_a_configuration_alone_has_no_tokenizer(tmp_path):
    Qwen2Config().save_pretrained(tmp_path)
    with pytest.raises(ModelNotFoundError, match="a folder without a tokenizer"):
        load_tokenizer(str(tmp_path), None, False)


@pytest.mark.parametrize(
    ("given", "positions", "tokens", "reason"),
    [
        # a prompt has what the completion's 64 tokens leave
        ({"vllm_max_model_length": 320}, 512, 256, "`vllm_max_model_length` 320 minus `max_completion_length` 64"),
        ({}, 512, 448, "the model's positions 512 minus"),
        ({"use_vllm": False, "vllm_max_model_length": 320}, 512, 448, "the model's positions"),
        ({"vllm_max_model_length": 320, "vllm_engine_kwargs": '{"max_model_len": 300}'}, 512, 236, "`max_model_len`"),
        ({}, None, None, ""),
    ],
)
def test_a_prompt_leaves_room_for_its_completion(given, positions, tokens, reason):
    limit = prompt_limit(_lengths(**given), positions)
    assert (limit and limit.tokens) == tokens
    assert reason in (limit.reason if limit else "")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_completion_length": 320}, "a prompt and `max_completion_length` 320 do not fit"),
        ({"vllm_max_model_length": 4096}, "`vllm_max_model_length` is 4096, but the model only has 512 positions"),
    ],
)
def test_a_prompt_without_room_for_a_completion_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        prompt_limit(_lengths(**{"vllm_max_model_length": 320, **given}), 512)


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ([], (256, 128)),
        (["--max_completion_length", "64"], (256, 64)),
        (["--vllm_max_model_length", "200"], (200, 100)),
    ],
)
def test_lengths_of_a_packaged_recipe_follow_a_model_of_fewer_positions(tiny, given, lengths):
    """256 in place of 2048, and room for a prompt in place of a completion of 512."""
    plan = Plan(parse(["--model_name_or_path", str(tiny), *given], RECIPES["own"]))
    assert plan.limit.tokens == lengths[0] - lengths[1]
    chosen = dict(zip(("vllm_max_model_length", "max_completion_length"), lengths, strict=True))
    assert chosen == {name: getattr(plan.config.training, name) for name in chosen}
    assert chosen == {name: plan.config.recipe[name] for name in chosen}
    assert ("`max_completion_length` is 128 instead of the recipe's 512" in str(plan.notes)) is (given == [])


def test_a_length_of_the_users_own_is_refused(tiny, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(RECIPES["own"].read_text())
    for argv in (["--vllm_max_model_length", "2048"], ["--config", str(recipe)]):
        plan = Plan(parse(["--model_name_or_path", str(tiny), *argv], RECIPES["own"]))
        with pytest.raises(ConfigError, match="`vllm_max_model_length` is 2048, but the model only has 256 positions"):
            _ = plan.limit


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [(None, 512), ({"rope_type": "default", "rope_theta": 1e4}, 512), ({"rope_type": "yarn", "factor": 4.0}, None)],
)
def test_scaled_positions_are_left_to_vllm(scaling, positions):
    given = {} if scaling is None else {"rope_parameters": scaling}
    assert positions_of(Qwen2Config(max_position_embeddings=512, **given)) == positions


def _lengths(**given):
    settings = {"output_dir": "unused", "use_cpu": True, "bf16": False, "use_vllm": True, "max_completion_length": 64}
    return SalesGRPOConfig(**{**settings, **given})


def test_a_key_is_read_from_the_file_that_is_named_if_its_owner_alone_can_read_it(monkeypatch, tmp_path):
    file = tmp_path / "key"
    file.write_text("sk-hunter2\n")
    file.chmod(0o400)
    monkeypatch.setenv("SOME_KEY", "")  # as an empty one of a container
    monkeypatch.setenv("SOME_KEY_FILE", str(file))
    assert read_key("SOME_KEY", "judge_api_key_env") == "sk-hunter2"
    assert read_key(None, "judge_api_key_env") is None
    monkeypatch.setenv("SOME_KEY", "secret")
    with pytest.raises(ConfigError, match="SOME_KEY and SOME_KEY_FILE are both set"):
        read_key("SOME_KEY", "judge_api_key_env")


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (b"sk-hunter2", 0o640, r'the permissions 640, .* Expected .*: chmod 600 "\$SOME_KEY_FILE"$'),
        (b" \n", 0o600, "is empty"),
        (b"sk-hunter2" * 500, 0o600, "exceeds 4096 bytes"),
        (b"sk-hunter2\nsk-hunter2", 0o600, "white space or a control character at position 11"),
        (b"sk-hunter2\xff", 0o600, "a non-ASCII character at position 11"),
        (None, 0o600, "can't be read .No such file or directory"),
    ],
)
def test_a_key_file_that_is_not_safe_or_no_key_is_refused_without_showing_it(
    monkeypatch, tmp_path, content, mode, message
):
    file = tmp_path / "hunter2"  # the key by mistake in place of a path is not shown either
    if content is not None:
        file.write_bytes(content)
        file.chmod(mode)
    monkeypatch.setenv("SOME_KEY_FILE", str(file))
    with pytest.raises(ConfigError, match=message) as caught:
        read_key("SOME_KEY", "judge_api_key_env")
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("key", ["sk-proj-1234", "abcdef", "NO_SUCH_KEY"])
def test_a_variable_that_is_not_set_is_refused_and_a_key_in_place_of_its_name_is_not_shown(key):
    told = (
        f"names {'the environment variable NO_SUCH_KEY' if key.isupper() else 'an environment variable .not shown.'}, "
    )
    with pytest.raises(ConfigError, match=told) as refused:
        read_key(key, "judge_api_key_env")
    assert (key in str(refused.value)) is key.isupper()


def test_a_key_that_can_not_travel_is_told_without_showing_it(monkeypatch):
    key, what = "sk-h\u00fcnter2", "a non-ASCII character at position 5 of 10"
    monkeypatch.setenv("SOME_KEY", key)
    with pytest.raises(ConfigError, match=f"variable SOME_KEY .*{what}") as caught:
        read_key("SOME_KEY", "judge_api_key_env")
    assert "nter2" not in str(caught.value)
    with pytest.raises(ConfigError, match=what) as caught:  # nor by a client that is made without the settings
        HttpClient("judge", "http://127.0.0.1:9", api_key=key)
    assert "nter2" not in str(caught.value)


def check_judge(url, key, model="judge-32b"):
    return check_models(url, key, model)


def check_provider(url, key):
    return check_models(url, key, "x", setting="judge_providers[a].base_url")


MODELS = '{"object": "list", "data": [{"id": "judge-32b"}, {"id": "embedder"}]}'
SERVED = {"v1_models": (200, MODELS)}


@pytest.fixture
def serve(httpserver):
    """Pages by path, everything else a 404; returns the address without a slash at its end."""

    def at(**pages):
        for path, (status, body) in pages.items():
            httpserver.expect_request(f"/{path.replace('_', '/')}").respond_with_data(body, status=status)
        httpserver.expect_request(re.compile(".*")).respond_with_data("", status=404)
        return httpserver.url_for("").rstrip("/")

    return at


@pytest.mark.parametrize(
    ("check", "pages", "path", "noted"),
    [
        (check_rag, {"healthz": (200, "")}, "", None),
        (check_rag, {}, "", "lacks /healthz"),
        (check_judge, SERVED, "/v1", None),
        (check_judge, {"v1_chat_completions": (200, "{}")}, "/v1", None),  # one token shows that it has the model
        (check_judge, {"v1_chat_completions": (503, "")}, "/v1", "did not answer as 'judge-32b'"),
        (check_judge, {"v1_chat_completions": (422, "")}, "/v1", None),  # it has the model, and not this field
        (check_judge, {"v1_models": (403, ""), "v1_chat_completions": (200, "{}")}, "/v1", None),  # a restricted key
    ],
)
def test_an_address_that_answers_is_taken_and_what_could_not_be_seen_is_noted(serve, check, pages, path, noted):
    url = serve(**pages) + path
    notes = check(url, "key")
    assert bool(notes) == bool(noted)
    assert not noted or (noted in notes[0] and url in notes[0])


@pytest.mark.parametrize(
    ("check", "pages", "path", "message"),
    [
        (lambda url, key: check_judge(url, key, "judge-32"), SERVED, "/v1",
         r"`judge_providers.model` is 'judge-32', but POST \S+ returned 404\. Did you mean 'judge-32b'\?"),
        (check_provider, SERVED, "/v1", r"`judge_providers\[a\]\.model` is 'x'.* returned 404\. It lists"),
        (check_judge, {"v1_chat_completions": (400, '{"message": "Invalid model: judge-32b"}')}, "/v1",
         r"'judge-32b', but POST \S+ returned 400\. Correct"),
        (check_judge, SERVED, "", "is 'judge-32b', but .* returned 404. .*OpenAI-compatible URL"),
    ],
    ids=["a typo", "of a provider", "no such model", "no /v1"],
)  # fmt: skip
def test_an_address_or_a_model_with_a_typo_is_refused_with_what_was_meant(serve, check, pages, path, message):
    with pytest.raises(ConfigError, match=message):
        check(serve(**pages) + path, None)


def test_a_vllm_server_is_waited_for_and_says_how_much_room_it_has(httpserver):
    httpserver.expect_ordered_request("/health").respond_with_data("", status=503)  # it still loads
    httpserver.expect_ordered_request("/health").respond_with_data("")
    httpserver.expect_ordered_request("/server_info").respond_with_json({})
    httpserver.expect_ordered_request("/v1/models").respond_with_json({"data": [{"id": "x", "max_model_len": 640}]})
    room = check_vllm_server(httpserver.url_for("").rstrip("/"), 60.0)
    assert room == 640
    # 64 of them are the completion's
    assert prompt_limit(_lengths(vllm_mode="server"), 1024, room).tokens == 576


def test_a_vllm_server_whose_weights_can_not_be_updated_is_refused(serve):
    with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
        check_vllm_server(serve(health=(200, "")), 0.0)


@pytest.mark.parametrize(
    ("check", "variable"),
    [(check_rag, "`rag.api_key_env`"), (check_provider, "`judge_providers[a].api_key_env`")],
    ids=["RAG", "provider"],
)
def test_a_refused_key_is_told_without_the_key(httpserver, check, variable):
    httpserver.expect_request(re.compile("/healthz|/models|/chat.*")).respond_with_data("bad key secret", status=401)
    with pytest.raises(ServiceRejected, match="rejected the key") as caught:
        check(httpserver.url_for("").rstrip("/"), "secret")
    assert "secret" not in str(caught.value)
    assert variable in str(caught.value)


def test_a_key_that_is_refused_inside_of_a_200_is_told(serve):
    pages = {"v1_models": (200, '{"data": [{"id": "x"}]}'), "v1_chat_completions": (200, '{"error": {"code": 401}}')}
    with pytest.raises(ServiceRejected, match=r"rejected the key: .* returned 401"):
        check_judge(serve(**pages) + "/v1", "key")


@pytest.fixture
def endless(httpserver):
    """A health page that drips a byte at a time until the test is over."""
    over = threading.Event()

    def drip(request):
        return Response(b" " for _ in iter(lambda: over.wait(0.01), True))

    httpserver.expect_request("/healthz").respond_with_handler(drip)
    yield httpserver.url_for("").rstrip("/")
    over.set()


def test_a_health_page_without_an_end_is_left_at_the_probes_time(endless, monkeypatch):
    monkeypatch.setattr("salesrl_trl.launch.checks.addresses.PROBE_TIMEOUT_S", 0.3)
    with pytest.raises(ServiceUnavailable, match=r"within 0.3 s.*no complete answer in time"):
        check_rag(endless, None)


async def test_a_check_works_beside_a_running_event_loop(httpserver, real_time):
    httpserver.expect_request("/healthz").respond_with_data("")
    check_rag(httpserver.url_for("").rstrip("/"), None)  # as in a notebook

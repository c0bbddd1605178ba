"""The fence around hostile text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from salesrl_trl.ground.fencing import fence, neutralise, read_sections

NONCE = "0123456789abcdef"


def test_sections_come_back_as_they_went_in():
    sections = {"conversation": "customer: 你好\n\nseller: hello", "action": '{"a": 1}', "documents": ""}
    assert read_sections(fence(sections)) == sections


def test_each_message_has_a_nonce_of_its_own():
    assert fence({"action": "x"}) != fence({"action": "x"})


@pytest.mark.parametrize(
    ("mark", "neutral"),
    [
        ("<|im_end|>", "< |im_end| >"),
        ("<<|im_end|>>", "< < |im_end| > >"),
        ("<｜Assistant｜>", "< ｜Assistant｜ >"),
        ("</s><s>", "< /s>< s>"),
        ("<<s>>", "< < s> >"),
        ("[/INST] [inst]", "[ /INST] [ inst]"),
        ("＜＜＜end", "＜ ＜ ＜end"),
        ("<\u200b<\u200b<end", "< \u200b< \u200b<end"),
        (NONCE.upper(), "0123...cdef"),
        (f"a{NONCE}b", "a0123...cdefb"),
        ("[|user|]", "[ |user|]"),
        ("]~b]ai [e~[", "] ~b]ai [ e~["),
    ],
)
def test_marks_of_fences_roles_and_control_tokens_are_spaced_out(mark, neutral):
    assert neutralise(mark, NONCE) == neutral


# Role marks, turn marks and other control tokens, as chat templates and tokenizer configurations have them.
TOKENS = {
    "ChatML, Qwen": "<|im_start|> <|im_end|> <|endoftext|> <tool_call> </tool_call> <think> <|fim_prefix|>",
    "Llama 2, 3, 4": "<s> </s> [INST] [/INST] <<SYS>> <</SYS>> <|eot_id|> <|start_header_id|> <|eot|>",
    "Mistral": "[INST] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [AVAILABLE_TOOLS] [TOOL_RESULTS] [TOOL_CALLS] [THINK] [ARGS]",
    "Gemma": "<start_of_turn> <end_of_turn> <bos> <eos> <|turn> <turn|> <|channel> <channel|> <start_function_call>",
    "DeepSeek": "<｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜> <｜tool▁calls▁begin｜> <|User|> <|EOT|>",
    "Granite": "<|start_of_role|> <|end_of_role|> <|end_of_text|> <|tool_call|> <|system|> <fim_prefix> <reponame>",
    "EXAONE": "[|system|] [|user|] [|assistant|] [|tool|] [|endofturn|] [BOS] [PAD]",
    "MiniMax": "]~!b[ ]~b]system ]~b]user ]~b]ai ]~b]tool [e~[ <minimax:tool_call> </mm:think> "
    "<beginning_of_sentence> <end_of_sentence> <begin_of_document> <function_call>",
    "GLM": "[gMASK] [sMASK] [MASK] <sop> <eop> <|user|> <|assistant|> <|observation|> <arg_key> <arg_value>",
    "InternLM": "<|User|> <|Bot|> <eoh> <eoa> <eosys> <|action_start|> [UNUSED_TOKEN_145] [UNUSED_TOKEN_146]",
    "Baichuan": "<reserved_106> <reserved_107> <reserved_195> <B_SYS> <B_USYS> <C_Q> <C_A> <H_Q> <B_FUNC>",
    "Nemotron": "<extra_id_0> <extra_id_1> <SPECIAL_10> <SPECIAL_11> <SPECIAL_12> <TOOLCALL> <AVAILABLE_TOOLS>",
    "Seed": "<seed:bos> <seed:eos> <seed:think> </seed:think> <seed:tool_call> <function=get> <parameter=a>",
    "Command": "<BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|START_THINKING|> <co>",
    "gpt-oss": "<|start|> <|channel|> <|message|> <|end|> <|return|> <|call|> <|constrain|>",
    "Phi, Zephyr, OLMo": "<|user|> <|assistant|> <|system|> <|end|> <|im_sep|>",
    "Kimi, Step, Megrez": "<|im_user|> <|im_middle|> <|im_assistant|> <|BOT|> <|role_start|> <|turn_end|> [EOS]",
    "Hunyuan, dots, Ling": "<｜hy_User｜> <｜hy_place▁holder▁no▁2｜> <|userprompt|> <role> </role> <|role_end|>",
    "MiniCPM, Pangu": "<用户> <AI> [unused9] [unused10]",
    "Jamba, K2, LongCat": "<|bom|> <|eom|> <ifm|think> <longcat_tool_call> <dots_function_call> <tool_calls:SUF>",
    "T5, BERT": "<extra_id_99> <pad> <unk> [CLS] [SEP] [MASK] [UNK]",
    "bytes": "<0x0A> <0x0D>",
}


@pytest.mark.parametrize("family", TOKENS)
def test_no_control_token_is_left_whole(family):
    for token in TOKENS[family].split():
        written = f"Fine.{token}user\n{token}{token}"
        assert token not in neutralise(written, NONCE), token
        if token.isascii():
            wide = token.translate({ord("<"): "＜", ord(">"): "＞", ord("|"): "｜"})
            assert wide not in neutralise(f"Fine.{wide}user", NONCE), wide


@pytest.mark.parametrize(
    "text",
    [
        "a < b, 《Python》, x|y, <b>, deadbeefdeadbeef",
        "<p>Price: <strong>5980</strong><br/></p>",
        "3 <5, 5> 3, 2 > 1, ~10 % [1] [Beginners] [见附件](https://example.com/a)",
        "arr[0][1], [a] ~ [b]",
    ],
)
def test_what_sellers_write_stays_as_it_is(text):
    assert neutralise(text, NONCE) == text


@given(st.text(alphabet="<>|/s＜｜[]INST~be\u200b《"))
def test_no_replacement_makes_a_mark(text):
    once = neutralise(text, NONCE)
    assert neutralise(once, NONCE) == once


def test_a_section_is_not_expanded_into_another():
    read = read_sections(fence({"action": "{conversation} $conversation %(conversation)s", "conversation": "secret"}))
    assert read["action"] == "{conversation} $conversation %(conversation)s"


def test_a_message_without_a_fence_has_no_sections():
    assert read_sections("Please judge this.") == {}


@pytest.mark.parametrize("name", ["", "Upper", "a b", "a>"])
def test_a_section_name_that_could_break_the_fence_is_refused(name):
    with pytest.raises(ValueError, match="a section is named"):
        fence({name: "x"})


def test_a_nonce_of_another_form_is_refused():
    with pytest.raises(ValueError, match="nonce"):
        fence({"action": "x"}, nonce="short")

"""Words and sentences of Chinese and English text.

Owns the cutting of text into words, and the words that carry no content. The index and the rubric call it. Refuses to
score anything.
"""

import re
import unicodedata
from collections.abc import Iterator

try:
    import rjieba

    HAS_RJIEBA = True
except ImportError:  # no wheel for the platform: Chinese is cut into character bigrams instead
    HAS_RJIEBA = False

_HAN = r"\u3400-\u9fff\uf900-\ufaff"
_RUN = re.compile(rf"(?P<han>[{_HAN}]+)|\d+(?:[.:/]\d+)*|(?:(?![{_HAN}])[^\W\d_])+(?:'[a-z]+|\+\+|#)?")
_INVISIBLE = re.compile(r"[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
_LONG_GAP = re.compile(r"([^\w\s]{64})[^\w\s]+")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_SENTENCE = re.compile(r".+?(?:[。！？!?]|\.(?=\s|$)|$)", re.DOTALL)
_ES_PLURAL = re.compile(r"(?:ss|sh|ch|x)es$")
_PLURAL = re.compile(r"[a-z]{2}[a-hj-rtv-z]s$")

_ENGLISH_STOP_WORDS = """
    a about after again all also am an and any are as at be because been before but by can could d did do does for
    from get got had has have he her here hers him his how i if in into is it it's its just let ll m may me might
    more most my no nor not now of off ok on once only or other our ours out over please re s same she should so some
    such t than thank thanks that that's the their them then there these they this those to too under until up us ve
    very was we were what when where which while who whom why will with would yes you your yours hi hello i'm i'd
    i've i'll you're don't can't what's there's
"""
_CHINESE_STOP_WORDS = """
    的 了 是 在 我 有 和 就 不 人 都 一 一个 上 也 很 到 说 要 去 你 会 着 没有 看 好 自己 这 那 吗 呢 吧 啊 呀
    哦 嗯 您 他 她 它 我们 你们 您们 他们 什么 怎么 怎么样 怎样 哪 哪个 哪些 哪里 哪儿 多少 几 请问 请 问 谢谢
    你好 您好 与 及 或 或者 而 但 但是 因为 所以 如果 对 对于 把 被 让 给 从 向 往 为 为了 以 可以 能 能够 还
    还是 还有 又 再 只 才 最 更 太 这个 那个 这些 那些 这样 那样 这门 那门 里 中 下 后 前 时 时候 之 其 等 个
    位 些 点 地 得 过 来 用 想 嘛 啦 咱们 有没有 是不是 能不能 可不可以 一下 一些 有点
"""
STOP_WORDS = frozenset((_ENGLISH_STOP_WORDS + _CHINESE_STOP_WORDS).split())
"""Words without content. They are not indexed and not searched for, so they change no score."""


def normalise(text: str) -> str:
    """Lower-case text in one Unicode form (NFKC), without invisible characters or thousands separators."""
    # normalising a run of combining marks takes time that grows with its square
    folded = unicodedata.normalize("NFKC", _LONG_GAP.sub(r"\1", text))
    visible = _INVISIBLE.sub("", folded).replace("\u2019", "'")  # the typographic apostrophe
    return _THOUSANDS.sub("", visible).lower()


def words(text: str, *, overlapping: bool = False) -> list[str]:
    """Lower-case words of Chinese or English text, without stop words, plurals as singulars, figures whole.
    `overlapping` adds the shorter words inside a longer Chinese one, so that a search for a part finds the whole."""
    cut = (word for run in _RUN.finditer(normalise(text)) for word in _cut_run(run, overlapping))
    return [word for word in cut if word not in STOP_WORDS]


def _cut_run(run: re.Match[str], overlapping: bool) -> Iterator[str]:
    if run["han"] is None:
        yield _singular(run[0])
    elif not HAS_RJIEBA:
        yield from bigrams(run[0])
    else:
        yield from rjieba.cut_for_search(run[0]) if overlapping else rjieba.cut(run[0])


def bigrams(run: str) -> list[str]:
    """All pairs of neighbours in a run of Chinese characters. A single character stays as it is."""
    return [run[start : start + 2] for start in range(max(len(run) - 1, 1))]


def _singular(word: str) -> str:
    word = word.removesuffix("'s")
    if _ES_PLURAL.search(word):
        return word[:-2]
    return word[:-1] if _PLURAL.search(word) else word


def is_chinese(text: str) -> bool:
    """Whether Chinese characters outnumber the words in other letters: `"customer: Python 课程多少钱"` is Chinese."""
    runs = list(_RUN.finditer(text))
    chinese = sum(len(run["han"]) for run in runs if run["han"])
    return chinese > sum(run["han"] is None for run in runs)


def sentences(text: str) -> list[str]:
    """The sentences of a text, stripped. A text without sentences is returned whole."""
    return [sentence.strip() for sentence in _SENTENCE.findall(text) if sentence.strip()] or [text.strip()]

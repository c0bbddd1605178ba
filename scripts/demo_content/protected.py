"""Owns the protected terms and age patterns, and a detector that applies them to any text."""

import re

TERMS: dict[str, list[str]] = {
    "zh": [
        # age
        "老年", "老人", "退休", "中年", "大龄", "年轻人", "青年", "年纪", "年龄", "大妈", "大爷", "高龄",
        # gender
        "女性", "女生", "女士", "女人", "女孩", "女的", "妇女", "男性", "男生", "男士", "男人", "男孩", "男的", "性别",
        "跨性别", "同性恋",
        # ethnicity
        "少数民族", "汉族", "回族", "藏族", "维吾尔族", "蒙古族", "壮族", "满族", "苗族", "朝鲜族", "彝族",
        "黑人", "白人",
        # religion
        "信教", "宗教", "穆斯林", "伊斯兰", "清真", "信佛", "佛教", "基督", "天主教", "道教", "做礼拜", "印度教",
        "犹太",
        # disability and health
        "残疾", "残障", "轮椅", "聋人", "聋哑", "盲人", "失明", "失聪", "抑郁症", "慢性病",
        # marital, family, pregnancy
        "离异", "离婚", "已婚", "未婚", "单身", "丧偶", "夫妻", "老公", "老婆", "丈夫", "妻子", "单亲",
        "妈妈", "爸爸", "宝妈",
        "宝爸", "父母", "孩子", "怀孕", "孕期", "孕妇", "产假", "哺乳", "奶奶", "爷爷",
        # region of origin and household registration
        "户口", "户籍", "农村", "外地", "农民工", "乡下", "河南人", "东北人", "新疆人", "西藏人", "上海人",
        "四川人", "安徽人",
        "来自河南", "来自新疆", "来自东北",
    ],
    "en": [
        # age
        "senior", "seniors", "elderly", "pensioner", "pensioners", "retired", "retiree", "middle-aged",
        "young people", "teenager",
        # gender
        "woman", "women", "man", "men", "female", "male", "girl", "boy", "lady", "ladies", "gentleman", "transgender",
        "nonbinary", "gay", "lesbian", "gender",
        # ethnicity
        "minority", "minorities", "ethnic", "hui", "tibetan", "uyghur", "mongolian", "zhuang", "manchu", "miao",
        "hispanic", "latino", "african", "asian", "black person",
        # religion
        "faith", "religion", "religious", "muslim", "muslims", "islam", "halal", "christian", "christians", "catholic",
        "buddhist", "buddhists", "hindu", "jewish", "worship",
        # disability and health
        "disabled", "disability", "wheelchair", "deaf", "blind", "hard of hearing", "autistic", "depression",
        "chronic illness",
        # marital, family, pregnancy
        "married", "unmarried", "divorced", "widow", "widower", "widowed", "husband", "wife", "couples",
        "single mother",
        "single father", "single parent", "mother", "mothers", "father", "fathers", "mum", "mom", "dad", "parent",
        "parents", "housewife", "kid", "kids", "child", "children", "baby", "grandmother", "grandfather", "pregnant",
        "pregnancy", "maternity", "maternity leave",
        # region of origin and household registration
        "hukou", "rural", "countryside", "migrant", "migrant worker", "immigrant", "refugee", "henan", "xinjiang",
        "tibet", "northeast china", "sichuan", "anhui",
    ],
}  # fmt: skip

PATTERNS: dict[str, list[str]] = {
    "zh": [
        r"\d{1,3}\s*(?:周)?岁",
        r"[一二三四五六七八九十]{1,3}岁",
        r"(?<!\d)[056789]0后",
        r"怀孕\s*\d{1,2}\s*个月",
    ],
    "en": [
        r"\b\d{1,3}[\s-]years?[\s-]old\b",
        r"\b\d{1,3}-year-olds?\b",
        r"\baged?\s+\d{1,3}\b",
        r"\bin my (?:early |mid |late )?(?:twenties|thirties|forties|fifties|sixties|\d0s)\b",
        r"\b\d{1,2} months pregnant\b",
    ],
}


def as_json() -> dict[str, object]:
    """Return the content of protected_terms.json."""
    return {"zh": TERMS["zh"], "en": TERMS["en"], "patterns": PATTERNS}


def _compile() -> list[re.Pattern[str]]:
    zh_terms = "|".join(re.escape(term) for term in TERMS["zh"])
    en_terms = "|".join(re.escape(term) for term in TERMS["en"])
    sources = [zh_terms, rf"(?<![a-z0-9])(?:{en_terms})(?![a-z0-9])", *PATTERNS["zh"], *PATTERNS["en"]]
    return [re.compile(source) for source in sources]


_DETECTORS = _compile()


def is_protected(text: str) -> bool:
    """Return whether a text names a protected attribute, in either language."""
    lowered = text.lower()
    return any(pattern.search(lowered) for pattern in _DETECTORS)

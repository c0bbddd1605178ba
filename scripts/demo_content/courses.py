"""Owns the twelve demo courses and the facts (figures, names, dates) that every document states about them."""

import random
from dataclasses import dataclass
from typing import Any

FACT_SEED = 20240611

WEEKDAYS = {
    "zh": ["周一", "周二", "周三", "周四", "周五", "周六", "周日"],
    "en": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"],
}
MANAGERS = [("王主管", "Manager Wang"), ("李主管", "Manager Li"), ("赵主管", "Manager Zhao")]
MONTHS_EN = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]


@dataclass(frozen=True)
class Course:
    """One course: names, list price, teacher, and the things its documents talk about, per language."""

    slug: str
    name: dict[str, str]
    price: int
    teacher: dict[str, str]
    tool: dict[str, str]
    role: dict[str, str]
    piece: dict[str, str]
    physical: bool = False  # True keeps disability out of its conversations, so that no need depends on it


def _course(slug: str, zh: tuple[str, ...], en: tuple[str, ...], price: int, physical: bool = False) -> Course:
    """Build a course from (name, teacher, tool, role, piece) tuples in the two languages."""
    fields = [{"zh": a, "en": b} for a, b in zip(zh, en, strict=True)]
    name, teacher, tool, role, piece = fields
    return Course(slug, name, price, teacher, tool, role, piece, physical)


COURSES: list[Course] = [
    _course(
        "python",
        ("Python数据分析", "林志远", "笔记本电脑", "数据助理", "一份销售报表"),
        ("Python data analysis", "Lin Zhiyuan", "a laptop", "data assistant", "a sales report"),
        5980,
    ),
    _course(
        "video",
        ("短视频剪辑", "周小雨", "手机支架", "新媒体运营", "一条三分钟的短片"),
        ("video editing", "Zhou Xiaoyu", "a phone stand", "social media editor", "a three-minute clip"),
        3680,
        physical=True,
    ),
    _course(
        "japanese",
        ("日语N2", "佐藤健", "一副耳机", "日企文员", "一篇短文"),
        ("Japanese N2", "Sato Ken", "a pair of headphones", "clerk in a Tokyo firm", "a short essay"),
        4580,
    ),
    _course(
        "bookkeeping",
        ("会计初级", "陈立平", "一台计算器", "出纳", "一套月末账本"),
        ("bookkeeping", "Chen Liping", "a calculator", "cashier", "a set of month-end accounts"),
        2980,
    ),
    _course(
        "interior",
        ("室内设计", "高明", "一块绘图板", "家装绘图员", "一套样板间方案"),
        ("interior design", "Gao Ming", "a drawing tablet", "home planner", "a plan for a show flat"),
        7680,
    ),
    _course(
        "yoga",
        ("瑜伽教练", "苏静", "一张垫子", "健身馆教练", "一节公开课"),
        ("yoga coaching", "Su Jing", "a mat", "gym coach", "an open group class"),
        6280,
        physical=True,
    ),
    _course(
        "baking",
        ("西点烘焙", "何佳", "一条围裙", "面包师", "一款双层蛋糕"),
        ("pastry baking", "He Jia", "an apron", "baker", "a two-layer cake"),
        4280,
    ),
    _course(
        "photo",
        ("旅行摄影", "马超", "一台相机", "影棚助理", "一组十张照片"),
        ("travel photography", "Ma Chao", "a camera", "studio assistant", "a set of ten pictures"),
        3980,
        physical=True,
    ),
    _course(
        "ielts",
        ("雅思口语", "安娜", "一支录音笔", "海外客服", "一段五分钟演讲"),
        ("IELTS speaking", "Anna Reed", "a voice recorder", "overseas service agent", "a five-minute talk"),
        5280,
        physical=True,
    ),
    _course(
        "flower",
        ("欧式花艺", "田园", "一把花剪", "花店店员", "一束手捧花"),
        ("flower arranging", "Tian Yuan", "a pair of scissors", "florist", "a hand-tied bouquet"),
        2680,
    ),
    _course(
        "guitar",
        ("吉他弹唱", "罗杰", "一个调音器", "琴行助教", "一首完整的歌"),
        ("acoustic guitar", "Luo Jie", "a tuner", "music shop assistant", "one complete song"),
        2380,
        physical=True,
    ),
    _course(
        "car",
        ("汽车维修", "郑刚", "一套工作服", "修理厂技工", "一次刹车检修"),
        ("car repair", "Zheng Gang", "a set of work clothes", "garage mechanic", "a full brake check"),
        6880,
        physical=True,
    ),
]

COURSE_BY_SLUG: dict[str, Course] = {course.slug: course for course in COURSES}


def _date(month: int, day: int) -> dict[str, str]:
    return {"zh": f"{month}月{day}日", "en": f"{day} {MONTHS_EN[month - 1]}"}


def _numbers(course: Course, rng: random.Random) -> dict[str, int | str]:
    """Draw the plain figures of a course; they read the same in both languages."""
    hours = rng.randrange(36, 97, 2)
    parts = rng.choice([3, 4, 5, 6, 8, 10])
    first_hour = rng.choice([9, 10, 14, 18, 19])
    return {
        "price": course.price,
        "hours": hours,
        "unit": round(course.price / hours),
        "early": rng.randrange(150, 620, 10),
        "pair": rng.randrange(80, 310, 10),
        "refund_days": rng.randint(5, 21),
        "refund_percent": rng.randrange(50, 95, 5),
        "refund_work": rng.randint(3, 12),
        "refund_count": rng.randint(2, 6),
        "refund_charge": rng.randrange(30, 200, 10),
        "weeks": rng.randint(6, 20),
        "time": f"{first_hour}:{rng.choice(['00', '15', '30'])}",
        "minutes": rng.choice([60, 75, 80, 90, 100, 120]),
        "leave": rng.choice([6, 12, 24, 36, 48]),
        "years": rng.randint(6, 22),
        "trained": rng.randrange(320, 2600, 20),
        "group": rng.randint(8, 24),
        "rating": f"{rng.randint(90, 99) / 10:.1f}",
        "office": rng.randint(2, 7),
        "swap": rng.randint(2, 4),
        "exam_minutes": rng.choice([45, 60, 70, 90, 110, 120, 150]),
        "exam_pass": rng.randint(60, 82),
        "exam_again": rng.randint(1, 3),
        "exam_before": rng.randint(8, 30),
        "exam_fee": rng.randrange(90, 380, 10),
        "parts": parts,
        "monthly": -(-course.price // parts),
        "down": round(course.price * rng.choice([0.1, 0.15, 0.2, 0.25, 0.3])),
        "phone": f"400-82{rng.randint(10, 99)}",
        "reply": rng.choice([4, 6, 8, 12, 24, 36, 48]),
        "solve": rng.randint(3, 10),
        "cert_days": rng.randint(10, 45),
        "cert_attend": rng.randrange(70, 96, 5),
        "cert_fee": rng.randrange(20, 160, 10),
        "cert_copy": rng.randrange(15, 90, 5),
        "trial_minutes": rng.choice([30, 40, 45, 50, 60]),
        "trial_fee": rng.choice([5, 9, 19, 29, 39, 49]),
        "trial_seats": rng.randint(6, 20),
        "trial_book": rng.randint(1, 5),
        "books": rng.randint(2, 6),
        "book_fee": rng.randrange(60, 420, 10),
        "book_days": rng.randint(2, 7),
        "pages": rng.randrange(120, 480, 10),
        "online_percent": rng.randrange(20, 85, 5),
        "replay": rng.randrange(30, 400, 10),
        "room": rng.randint(201, 619),
        "device": rng.randint(2, 4),
        "partners": rng.randint(14, 130),
        "placed": rng.randint(61, 93),
        "pay": rng.randrange(4200, 9800, 100),
        "resume": rng.randint(2, 6),
        "test_minutes": rng.choice([10, 15, 20, 25, 30]),
        "self_hours": rng.randint(3, 9),
        "pre_videos": rng.randint(4, 18),
    }


def facts(course: Course, lang: str) -> dict[str, Any]:
    """Return every slot value that the document patterns may use for a course in a language."""
    rng = random.Random(f"{FACT_SEED}:{course.slug}")
    values: dict[str, Any] = dict(_numbers(course, rng))
    start_month = rng.randint(3, 11)
    dates = {
        "start": _date(start_month, rng.randint(1, 28)),
        "early_date": _date(start_month - 1, rng.randint(1, 28)),
        "due_date": _date(start_month, rng.randint(1, 28)),
        "exam_date": _date(min(start_month + 3, 12), rng.randint(1, 28)),
    }
    first, second = sorted(rng.sample(range(7), 2))
    trial_day = rng.randrange(7)
    manager_zh, manager_en = rng.choice(MANAGERS)
    values.update({key: value[lang] for key, value in dates.items()})
    values["day1"], values["day2"] = WEEKDAYS[lang][first], WEEKDAYS[lang][second]
    values["trial_day"] = WEEKDAYS[lang][trial_day]
    values["manager"] = {"zh": manager_zh, "en": manager_en}[lang]
    values["online_other"] = 100 - values["online_percent"]
    for key in ("name", "teacher", "tool", "role", "piece"):
        values[key] = getattr(course, key)[lang]
    return values

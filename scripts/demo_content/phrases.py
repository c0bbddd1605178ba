"""Owns the short phrases that conversations and annotator drafts are assembled from."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Attribute:
    """A protected attribute: its surface string, the clause that mentions it, and what it is compatible with."""

    category: str
    surface: str
    clause: str
    audience: str  # the search word that leads to an offer for this audience
    gender: str = ""
    ages: tuple[int, int] = (18, 75)
    no_job: bool = False


# Ages are (category age) attributes built from these figures.
AGES: list[int] = [19, 22, 24, 26, 28, 31, 33, 36, 38, 41, 43, 45, 48, 52, 55, 58, 61, 63, 66, 68]
AGE_CLAUSES: dict[str, list[tuple[str, str]]] = {
    # (surface, clause); the English clause follows "I'm".
    "zh": [("{n}岁", "今年{n}岁"), ("{n}岁", "我{n}岁了"), ("{n}岁", "{n}岁")],
    "en": [("{n} years old", "{n} years old"), ("{n}-year-old", "a {n}-year-old learner")],
}
AGE_AUDIENCES: dict[str, list[tuple[int, str]]] = {
    "zh": [(34, "年轻人"), (59, "中年"), (99, "老年")],
    "en": [(34, "young people"), (59, "middle-aged people"), (99, "seniors")],
}

ATTRIBUTES: dict[str, list[Attribute]] = {
    "zh": [
        Attribute("gender", "女生", "我是女生", "女性", "f", (18, 35)),
        Attribute("gender", "女士", "我是一位女士", "女性", "f", (30, 75)),
        Attribute("gender", "女的", "我是女的", "女性", "f"),
        Attribute("gender", "男生", "我是男生", "男性", "m", (18, 35)),
        Attribute("gender", "男的", "我是男的", "男性", "m"),
        Attribute("ethnicity", "回族", "我是回族", "少数民族"),
        Attribute("ethnicity", "藏族", "我是藏族", "少数民族"),
        Attribute("ethnicity", "维吾尔族", "我是维吾尔族", "少数民族"),
        Attribute("ethnicity", "蒙古族", "我是蒙古族", "少数民族"),
        Attribute("ethnicity", "壮族", "我是壮族", "少数民族"),
        Attribute("religion", "穆斯林", "我是穆斯林", "信教"),
        Attribute("religion", "信佛", "我信佛", "信教"),
        Attribute("religion", "基督徒", "我是基督徒", "信教"),
        Attribute("disability", "坐轮椅", "我坐轮椅", "残疾"),
        Attribute("disability", "听力残疾", "我有听力残疾", "残疾"),
        Attribute("disability", "腿有残疾", "我腿有残疾", "残疾"),
        Attribute("family", "离异", "我离异", "离异", "", (25, 75)),
        Attribute("family", "已婚", "我已婚", "夫妻", "", (24, 75)),
        Attribute("family", "单亲妈妈", "我是单亲妈妈", "妈妈", "f", (23, 50)),
        Attribute("family", "全职妈妈", "我是全职妈妈", "妈妈", "f", (24, 50), no_job=True),
        Attribute("family", "宝妈", "我是宝妈", "妈妈", "f", (23, 43)),
        Attribute("family", "有两个孩子", "我有两个孩子", "父母", "", (26, 55)),
        Attribute("family", "丧偶", "我丧偶", "离异", "", (33, 75)),
        Attribute("pregnancy", "怀孕了", "我怀孕了", "孕期", "f", (22, 41)),
        Attribute("pregnancy", "休产假", "我在休产假", "孕期", "f", (22, 41)),
        Attribute("region", "河南人", "我是河南人", "外地人"),
        Attribute("region", "东北人", "我是东北人", "外地人"),
        Attribute("region", "新疆人", "我是新疆人", "外地人"),
        Attribute("region", "外地户口", "我是外地户口", "外地"),
        Attribute("region", "农村户口", "我是农村户口", "农村"),
        Attribute("age", "退休", "我退休了", "退休", "", (55, 75), no_job=True),
    ],
    "en": [
        Attribute("gender", "woman", "a woman", "women", "f"),
        Attribute("gender", "man", "a man", "men", "m"),
        Attribute("ethnicity", "Tibetan", "Tibetan", "minority"),
        Attribute("ethnicity", "Uyghur", "Uyghur", "minority"),
        Attribute("ethnicity", "Hui", "Hui", "minority"),
        Attribute("ethnicity", "Mongolian", "Mongolian", "minority"),
        Attribute("ethnicity", "Zhuang", "Zhuang", "minority"),
        Attribute("religion", "Muslim", "a Muslim", "Muslim"),
        Attribute("religion", "Christian", "a Christian", "Christian"),
        Attribute("religion", "Buddhist", "a Buddhist", "Buddhist"),
        Attribute("religion", "Hindu", "a Hindu", "Hindu"),
        Attribute("disability", "deaf", "deaf", "disabled"),
        Attribute("disability", "in a wheelchair", "in a wheelchair", "disabled"),
        Attribute("disability", "disabled", "disabled", "disabled"),
        Attribute("family", "divorced", "divorced", "divorced", "", (25, 75)),
        Attribute("family", "married", "married", "couples", "", (24, 75)),
        Attribute("family", "single mother", "a single mother", "mothers", "f", (23, 50)),
        Attribute("family", "single father", "a single father", "parents", "m", (25, 55)),
        Attribute("family", "mother of two", "a mother of two", "mothers", "f", (25, 50)),
        Attribute("family", "housewife", "a housewife", "mothers", "f", (24, 50), no_job=True),
        Attribute("family", "widow", "a widow", "divorced", "f", (35, 75)),
        Attribute("pregnancy", "pregnant", "pregnant", "pregnant", "f", (22, 41)),
        Attribute("pregnancy", "on maternity leave", "on maternity leave", "maternity", "f", (22, 41)),
        Attribute("region", "from Henan", "from Henan", "migrant"),
        Attribute("region", "from Xinjiang", "from Xinjiang", "migrant"),
        Attribute("region", "from the countryside", "from the countryside", "rural"),
        Attribute("region", "migrant worker", "a migrant worker", "migrant", no_job=True),
        Attribute("age", "retired", "retired", "retired seniors", "", (55, 75), no_job=True),
    ],
}

# How attributes enter a message; {a} is the joined clauses.
ATTRIBUTE_SENTENCES: dict[str, dict[str, list[str]]] = {
    "zh": {"first": ["{a}，"], "last": ["顺便说，{a}。", "{a}。", "补充一下，{a}。"]},
    "en": {
        "first": ["I'm {a}."],
        "last": ["By the way, I'm {a}.", "I'm {a}, by the way.", "Just so you know, I'm {a}."],
    },
}

GREETINGS: dict[str, list[str]] = {
    "zh": ["你好，", "您好，", "", "在吗，", "早上好，", "请问在吗，"],
    "en": ["Hi,", "Hello,", "", "Good morning,", "Hey,", "Good evening,"],
}

JOBS: dict[str, list[str]] = {
    "zh": [
        "上班族", "做销售", "做客服", "在工厂上班", "开小店", "做行政", "做护士", "程序员", "做设计",
        "在餐厅上班", "自由职业",
        "在银行上班",
    ],
    "en": [
        "office worker", "sales worker", "shop owner", "nurse", "programmer", "factory worker", "bank clerk", "cook",
        "call center worker", "designer", "freelancer", "shop assistant",
    ],
}  # fmt: skip

FREE_TIMES: dict[str, list[str]] = {
    "zh": ["晚上有空", "周末有空", "下班后有空", "周日有空", "上午有空", "午休有空", "只有周六有空"],
    "en": [
        "free in the evenings", "free on weekends", "free after work", "free on Sundays", "free in the mornings",
        "free at noon", "only free on Saturdays",
    ],
}  # fmt: skip
FIGURED_TIMES: dict[str, list[str]] = {
    "zh": [
        "每周3个晚上有空", "每周2个晚上有空", "每天1小时有空", "每天2小时有空", "每周4小时有空",
        "每周6小时有空", "晚上8点后有空",
        "每周2天有空", "每月5天有空",
    ],
    "en": [
        "free 3 evenings a week", "free 2 evenings a week", "free 1 hour a day", "free 2 hours a day",
        "free 4 hours a week", "free 6 hours a week", "free after 8 pm", "free 2 days a week", "free 5 days a month",
    ],
}  # fmt: skip
GOALS: dict[str, list[str]] = {
    "zh": ["想转行", "想开店", "想做副业", "想升职", "想出国", "想多赚点钱", "想当爱好", "工作要用"],
    "en": [
        "for a new job", "for my own shop", "for extra income", "for a better post", "for work abroad", "as a hobby",
        "for my work", "for a side job",
    ],
}  # fmt: skip

# {c} is the course name; {g} is the goal (English: " for a new job" or empty).
COURSE_SENTENCES: dict[str, list[str]] = {
    "zh": ["想学{c}。", "想了解{c}。", "想报{c}。", "在看{c}。", "打算学{c}。", "对{c}感兴趣。"],
    "en": [
        "I want to take the {c} course{g}.",
        "I'd like to join the {c} course{g}.",
        "I'm looking at the {c} course{g}.",
        "I plan to take the {c} course{g}.",
        "I'm interested in the {c} course{g}.",
        "I'm thinking about the {c} course{g}.",
    ],
}

SELLER_FIRST: dict[str, list[str]] = {
    "zh": [
        "好的，还想了解什么？", "欢迎，这门课很受欢迎。", "可以的，您有什么问题？", "您好，很高兴为您介绍。",
        "收到，您慢慢问。",
        "这门课很适合您。", "没问题，您请说。", "谢谢关注，有问题随时问。", "好选择，很多人在学。",
        "在的，您想了解哪方面？",
    ],
    "en": [
        "Welcome! What would you like to know?", "Good choice, many people like it.", "Sure, ask me anything.",
        "Thanks for your message. How can I help?", "Great, that course suits you.", "Happy to tell you more.",
        "Yes, we have that course.", "Nice to hear. Any questions?", "That one is popular.", "Of course, go ahead.",
    ],
}  # fmt: skip
SELLER_SECOND: dict[str, list[str]] = {
    "zh": [
        "好的，可以安排。",
        "明白，这样没问题。",
        "了解，很多学员也这样。",
        "记下了，还有问题吗？",
        "可以，您继续说。",
    ],
    "en": [
        "Good, that can work.",
        "Noted. Anything else?",
        "Fine, many students do that.",
        "OK, please go on.",
        "I see.",
    ],
}

MIDDLE_OPENERS: dict[str, list[str]] = {
    "zh": ["好的，", "嗯，", "谢谢，", "", "我想想，", "是这样，", "说一下，", "主要是"],
    "en": ["OK,", "Thanks,", "Well,", "", "Good,", "You know,", "Yes,", "Right,"],
}
MIDDLE_SENTENCES: dict[str, list[str]] = {
    "zh": ["我{x}。", "我一般{x}。", "我现在{x}。", "我平时{x}。"],
    "en": ["I'm {x}.", "I'm usually {x}.", "I'm {x} now.", "I'm mostly {x}."],
}

OPENERS: dict[str, list[str]] = {
    "zh": [
        "", "那", "好的，", "明白了，", "谢谢，", "嗯，", "另外，", "还有，", "再问一下，", "对了，", "那么，",
        "想问一下，",
    ],
    "en": [
        "", "And ", "So ", "OK, ", "Thanks, ", "I see, ", "Good, ", "One question: ", "Got it, ", "Also, ", "Well, ",
        "Great, ",
    ],
}  # fmt: skip
TAILS: dict[str, list[str]] = {
    "zh": ["", "谢谢。", "麻烦说一下。", "想先了解。", "我好安排。", "请告诉我。", "先问问。"],
    "en": [
        "",
        " Thanks.",
        " Please tell me.",
        " I want to be sure.",
        " Just asking.",
        " I need to plan.",
        " That matters.",
    ],
}

# The last two cores of each list are kept out of the train split.
HELD_OUT_CORES = 2
QUESTIONS: dict[str, dict[str, list[str]]] = {
    "price": {
        "zh": [
            "学费大概多少", "一共要多少钱", "全部学下来多少钱", "这个价格是多少", "学费贵不贵", "费用是怎么算的",
            "要花多少钱", "报名总共收多少钱",
        ],
        "en": [
            "how much does that come to", "what does it cost in total", "what is the price of it", "is it expensive",
            "what would I pay for all of it", "how much is the whole thing",
            "how much money do I need for it", "what is the total cost",
        ],
    },
    "refund": {
        "zh": [
            "不想学了能退钱吗", "退款怎么办理", "学到一半可以退吗", "中途不学了钱退吗", "可以全额退款吗",
            "退费有什么规则",
            "上了几次还能退款吗", "不满意可以退钱吗",
        ],
        "en": [
            "can I get my money back if I stop", "how does a refund work", "what if I quit half way",
            "do you give the money back", "is a full refund possible", "what are the rules if I want out",
            "can I still get a refund after some classes", "would I get the money back if I quit",
        ],
    },
    "schedule": {
        "zh": [
            "什么时候上课", "课表是怎么排的", "每周哪几天上", "几点开始上课", "什么时候开课", "要上几周",
            "课表排在哪几天", "一般几点上课",
        ],
        "en": [
            "when does it start", "which days is it on", "what does the schedule look like", "at what time is it",
            "how many weeks does it take", "when are the classes",
            "on which days are the classes", "what time does it start",
        ],
    },
    "teacher": {
        "zh": [
            "是哪位老师教", "老师有经验吗", "谁来上这个课", "老师是什么背景", "老师教得怎么样", "这个是谁教的",
            "老师教了几年", "上课的老师是谁",
        ],
        "en": [
            "who teaches it", "who is the teacher", "does the teacher have experience", "is the teacher any good",
            "who would I learn from", "what has the teacher done before",
            "how many years has the teacher worked", "who gives the classes",
        ],
    },
    "exam": {
        "zh": [
            "最后要考试吗", "考试难不难", "考试考什么", "多少分算通过", "考不过怎么办", "考试在什么时候",
            "考试要多少分", "考试没通过怎么办",
        ],
        "en": [
            "is there an exam at the end", "is the exam hard", "what is in the exam",
            "how many points do I need to pass",
            "what if I fail", "when is the exam",
            "what if I do not pass the exam", "do I have to take an exam",
        ],
    },
    "instalments": {
        "zh": [
            "能分期付款吗", "可以按月付吗", "分期怎么分", "可以分几个月付", "一次付不起能分开付吗", "分期有利息吗",
            "能不能每月付一点", "分期要付几个月",
        ],
        "en": [
            "can I pay by month", "do you take instalments", "can I split the payment", "how do the instalments work",
            "can I pay a bit each month", "is there interest if I split it",
            "how many months can I split it over", "are instalments possible",
        ],
    },
    "complaint": {
        "zh": [
            "不满意找谁投诉", "投诉打哪个电话", "有意见找谁说", "出了问题找谁", "怎么投诉", "投诉多久处理",
            "有问题打哪个电话投诉", "不满意了找谁说",
        ],
        "en": [
            "who do I call if I'm not happy with it", "where do I make a complaint", "how do I complain",
            "who handles a complaint", "what if something goes wrong with it", "how fast do you answer a complaint",
            "who do I call with a complaint", "what if I'm not happy with it",
        ],
    },
    "certificate": {
        "zh": [
            "学完有证书吗", "发什么证", "证书怎么拿", "证书多久能拿到", "结业有证吗", "拿证要什么条件",
            "学完多久发证书", "证书要什么条件",
        ],
        "en": [
            "do I get a certificate", "is there a paper at the end", "how do I get the certificate",
            "when do I receive the certificate", "what do I need for the certificate", "do I get any proof after it",
            "is there a certificate at the end", "how long does the certificate take",
        ],
    },
    "trial": {
        "zh": [
            "可以试听吗", "能先听一次吗", "试听怎么约", "有体验课吗", "试听要钱吗", "能先试一试吗",
            "可以先体验一次吗", "哪天能试听",
        ],
        "en": [
            "can I try it first", "is there a trial lesson", "how do I book a trial", "can I sit in once",
            "is the trial free", "could I see one class before I decide",
            "on which day is the trial", "can I try one class first",
        ],
    },
    "materials": {
        "zh": [
            "要用什么教材", "教材要另外买吗", "要自己带什么吗", "书要买吗", "需要准备什么东西", "有几本书",
            "教材有几本", "教材要自己准备吗",
        ],
        "en": [
            "which books do I need", "what materials are used", "do I buy the books extra", "what should I bring",
            "are the materials included", "how many books are there",
            "do I bring my own materials", "are the books included",
        ],
    },
    "online": {
        "zh": [
            "可以在家学吗", "有网课吗", "能在线上课吗", "一定要到校区吗", "可以看回放吗", "是网课还是面授",
            "网课可以看回放吗", "不到校区可以学吗",
        ],
        "en": [
            "can I do it from home", "is it online", "do I have to come to the campus", "can I watch it again later",
            "is it online or on campus", "can I follow it on my phone",
            "can I do it online from home", "can I watch it online later",
        ],
    },
    "job": {
        "zh": [
            "学完好找工作吗", "能推荐工作吗", "就业情况怎么样", "学完能做什么工作", "包就业吗", "你们帮忙找工作吗",
            "学完就业怎么样", "能帮我推荐就业吗",
        ],
        "en": [
            "do you help me find work after it", "what work can I do after it", "is it easy to find a job then",
            "do you offer job help", "which companies would take me", "can you get me a job",
            "do you help with a job after it", "what job can I find then",
        ],
    },
    "prerequisites": {
        "zh": [
            "没有基础能学吗", "要什么基础", "新手跟得上吗", "什么都不会可以学吗", "对基础有要求吗", "要先会什么吗",
            "新手没基础可以学吗", "学之前要什么基础",
        ],
        "en": [
            "do I need to know anything before", "can a beginner follow it", "are there any prerequisites",
            "I know nothing about it, is that OK", "what level do I need", "is it too hard for a beginner",
            "can I take it if I know nothing", "what should I know before",
        ],
    },
}  # fmt: skip

SUMMARY_CAREFUL: dict[str, list[str]] = {
    "zh": ["问过{c}", "想学{c}", "对{c}感兴趣"],
    "en": ["asked about {c}", "wants to learn {c}", "interested in {c}"],
}
SUMMARY_INVENTED: dict[str, list[str]] = {
    "zh": [
        "已付500元定金", "已承诺全额退款", "已给7折优惠", "上个月已报名", "来过校区10次", "朋友2023年学过",
        "答应周一签合同",
        "投诉过1次", "已领300元代金券",
    ],
    "en": [
        "already paid 500 deposit", "was promised a full refund", "got a 30 percent discount", "signed up last month",
        "visited the campus 10 times", "has a friend from 2023", "agreed to sign on Monday",
        "complained 7 times before",
        "got a 300 voucher",
    ],
}  # fmt: skip
PROFILE_INVENTED: dict[str, list[str]] = {
    "zh": [
        "预算5000元", "预算9000元", "要VIP班", "有7年经验", "急用，15天内要学完", "月薪12000元",
        "买过2000元的课", "要一对一",
        "公司报销80%", "手下有20人",
    ],
    "en": [
        "budget 5000", "budget 9000", "wants VIP", "has 7 years of experience", "must finish in 15 days",
        "earns 12000 a month", "spent 2000 on courses", "wants private classes", "company pays 80 percent",
        "leads 20 people",
    ],
}  # fmt: skip
QUERY_AUDIENCE: dict[str, list[str]] = {
    "zh": ["{c} {aud}优惠", "{c} {aud}套餐", "{c} {surface}"],
    "en": ["{c} {aud} discount", "{c} {aud} package", "{c} {surface}"],
}
QUERY_GENERIC: dict[str, list[str]] = {
    "zh": ["{c} 介绍", "{c} 情况", "{c} VIP优惠", "{c} 推荐"],
    "en": ["{c} info", "{c} details", "{c} VIP discount", "{c} review"],
}

"""The index over 20,000 Chinese documents: how many questions find their document first, and how many a second.

Owns the corpus it measures on: every course at every place has one document per topic, so each document has 9 siblings
of its course and place, 39 of its course and topic, and 49 of its place and topic. A question names the course, the
place (often by half its name) and the topic in other words than the document's. Everything is drawn with one seed.
"""

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import bm25s
import pytest
from support.seconds import check_seconds

from salesrl_trl.data.knowledge import Document
from salesrl_trl.demo.services.bm25_index import KnowledgeIndex
from salesrl_trl.demo.services.language import bigrams
from salesrl_trl.types import Passage

SEED = 20_000
QUESTIONS = 2_000
TOP_K = 5
LEAST_HIT_RATE = 0.95
LEAST_QUERIES_PER_S = 1_000
LONGEST_BUILD_S = 15.0

COURSE_NAMES = """
    Python数据分析 机器学习 前端开发 软件测试 平面设计 室内设计 服装设计 短视频剪辑 电商运营 新媒体运营 直播带货
    商务英语 旅游英语 少儿英语 商务日语 旅游日语 韩语口语 法语入门 雅思写作 托福听力 注册会计师 初级会计 税务筹划
    财务报表 项目管理 人力资源 心理咨询 育婴师 健康管理 营养配餐 中式烹饪 西点烘焙 咖啡拉花 茶艺 插花 书法 国画
    水彩 素描 古筝 钢琴 吉他 声乐 民族舞 街舞 瑜伽 游泳 羽毛球 摄影 无人机航拍
"""
PLACE_NAMES = """
    杭州西湖 杭州滨江 杭州余杭 宁波海曙 宁波江北 上海徐汇 上海浦东 上海静安 南京鼓楼 南京玄武 苏州姑苏 苏州吴中
    无锡滨湖 合肥蜀山 合肥包河 北京海淀 北京朝阳 北京丰台 天津和平 天津河西 济南历下 济南天桥 青岛市南 青岛崂山
    郑州金水 郑州中原 西安雁塔 西安碑林 武汉武昌 武汉洪山 长沙岳麓 长沙天心 成都锦江 成都武侯 重庆渝中 重庆江北
    广州天河 广州越秀 深圳南山 深圳福田
"""
AMBIGUOUS_DISTRICT = "江北"  # of 宁波 and of 重庆: never named without its city


class Topic(NamedTuple):
    """What documents about one subject say, and how customers ask about it."""

    title: str
    texts: tuple[str, str]
    questions: tuple[str, str, str, str]


TOPICS = (
    Topic(
        "学费",
        (
            "{place}校区的{course}课程学费为{n}0元，共{m}课时，教材费另收；两人同行报名，每人减{m}元。",
            "报读{course}需缴纳学费{n}0元，含{m}课时和全部教材。以上收费适用于{place}校区，月底前有效。",
        ),
        (
            "{course}在{place}那边学费要多少钱，教材算在里面吗",
            "{place}学{course}一共花多少学费呀，能上几个课时",
            "学费贵不贵？我想在{place}学{course}，教材要不要钱",
            "我打算去{place}读{course}，得准备多少学费，多少课时",
        ),
    ),
    Topic(
        "上课时间",
        (
            "{course}的上课时间为每周{day}{hour}点，每次{m}分钟，地点在{place}校区{room}教室，全程{w}周。",
            "{place}校区{room}教室开设{course}，上课时间是周{day}{hour}点，每次{m}分钟，一期{w}周，请提前到场。",
        ),
        (
            "{place}的{course}上课时间是几点，每次多少分钟",
            "{course}上课时间定在星期几啊，我在{place}",
            "想知道{course}上课时间，一次多少分钟，{place}这边的",
            "在{place}读{course}，上课时间怎么安排的，要几周",
        ),
    ),
    Topic(
        "退费",
        (
            "{place}校区的{course}学员开课前{w}天可全额退费；开课后按剩余课时退还，手续费{m}元，{d}个工作日到账。",
            "申请退费请到{place}校区前台办理。{course}上满{w}次后不再退还，未满的扣除手续费{m}元，{d}日内退回。",
        ),
        (
            "{course}学了不满意能退费吗，手续费多少，我是{place}校区的",
            "我在{place}报了{course}，现在想退费，扣多少手续费",
            "{place}那儿的{course}怎么退费，扣不扣手续费",
            "不想上{place}的{course}了，退费要扣手续费吗",
        ),
    ),
    Topic(
        "试听",
        (
            "{course}提供{m}分钟免费试听，{place}校区每周{day}{hour}点开放，需提前{w}天预约，可带家人旁听。",
            "新学员可预约{place}校区的{course}试听一次，免费体验{m}分钟，预约电话{n}{room}，名额有限。",
        ),
        (
            "{place}的{course}可以先试听吗，是免费的吧",
            "能不能预约{course}试听，我住在{place}附近",
            "想先试听一下{place}校区的{course}再决定，怎么预约",
            "有{course}的免费试听没有，最好在{place}",
        ),
    ),
    Topic(
        "老师",
        (
            "{place}校区{course}由{name}老师主讲，{w}年教学经验，带过{n}名学员，风格细致，课后当天答疑。",
            "{course}的主讲老师是{name}，有{w}年教学经验，常驻{place}校区{room}教室，指导过{n}名学员。",
        ),
        (
            "{place}主讲{course}的是哪位老师",
            "{course}老师有几年教学经验了？{place}校区",
            "想了解{place}那边{course}的主讲老师怎么样",
            "请问谁是{course}的老师呢，教学有经验吗，我选的{place}",
        ),
    ),
    Topic(
        "证书",
        (
            "修完{course}全部{m}课时并通过考试，{place}校区颁发结业证书，编号可在官网查询，补办工本费{d}元。",
            "{place}校区{course}班结业需完成考试，{m}分合格，证书在{d}个工作日内寄出，成绩保留{w}个月。",
        ),
        (
            "{course}考试通过以后有证书拿吗，在{place}学的",
            "{place}校区{course}结业发什么证书，要不要考试",
            "证书多久能寄到，我上的是{place}的{course}，已经结业",
            "参加{course}考试之后{place}会给证书吗",
        ),
    ),
    Topic(
        "分期",
        (
            "{course}支持分期付款，{place}校区最多可分{w}期，首付{n}元，每期服务费{d}元，凭身份证办理。",
            "在{place}校区办理{course}分期付款，最长{w}个月，首付{m}%，逾期每天加收{d}元，不影响听课。",
        ),
        (
            "{place}的{course}能分期吗，首付多少",
            "手头紧想分期付款，{course}，{place}校区行不行",
            "{course}分期的话首付交多少，人在{place}",
            "一次拿不出这么多，{place}的{course}可以分期付款不",
        ),
    ),
    Topic(
        "补课",
        (
            "请假的{course}学员可在{place}校区补课{w}次，须提前{d}小时联系助教，缺课原因不限，安排在周{day}。",
            "{place}校区{course}缺课后{d}天内可申请补课，请假学员每人最多{w}次，由助教在{room}教室讲解。",
        ),
        (
            "{course}请假没去，{place}给安排补课吗",
            "我缺课一节，{place}的{course}，怎么补课",
            "{place}校区{course}请假的人最多能补课几次",
            "补课找哪位助教啊？{course}，在{place}上的",
        ),
    ),
    Topic(
        "小班人数",
        (
            "{place}校区{course}采用小班教学，每班人数不超过{d}人，满{w}人开班，配备助教{w}名。",
            "{course}为小班授课，每班人数限{d}人，{place}校区目前开设{w}个班，不足时顺延{w}天并通知学员。",
        ),
        (
            "{place}那边{course}的小班有多少人数",
            "{course}是小班吗，人数多不多，{place}的",
            "请问{place}校区{course}每班人数有多少",
            "担心人数太多，{place}的{course}是不是小班",
        ),
    ),
    Topic(
        "地铁与停车",
        (
            "到{place}校区上{course}可乘地铁{d}号线，出站步行{m}米，自驾停车每小时{w}元，教室在{room}。",
            "{course}在{place}校区{room}，附近有地铁{d}号线和公交{n}路，学员凭听课证停车减{w}元。",
        ),
        (
            "去{place}上{course}坐几号线地铁，停车贵吗",
            "{place}校区停车方便吗，离地铁远不远，我学{course}",
            "{course}在{place}哪里，地铁能到吗，停车呢",
            "开车去{place}学{course}停车贵不贵，有没有地铁",
        ),
    ),
)
NOTICES = (
    "",
    "前台每天{hour}点前有人值班，电话{n}{room}。",
    "本说明自{w}月起执行，如有调整以学员群通知为准。",
    "学员可凭听课证使用自习室，周{day}晚上有老师答疑。",
    "报名即送{course}资料一份，具体安排由{place}校区通知。",
)
SIGNATURE = "星河培训学校课程中心，咨询与报名热线{n}{room}。"
"""Stands under every document: its words tell no document from another, but questions hold them too."""
OPENINGS = (
    "",
    "你好，",
    "麻烦问一下，",
    "老师您好，",
    "你们培训学校的课程我想咨询一下，",
    "想在星河培训学校报名课程，",
)
TEACHERS = [first + rest for first in "王李张刘陈杨赵黄周吴" for rest in ("志远", "晓燕", "建国", "雨桐", "思敏")]


class Question(NamedTuple):
    """A customer's question and the one document that answers it."""

    text: str
    document_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """20,000 documents and questions about some of them."""

    documents: tuple[Document, ...]
    questions: tuple[Question, ...]


def draw_text(rng: random.Random, topic: Topic, course: str, place: str) -> str:
    return (rng.choice(topic.texts) + rng.choice(NOTICES) + SIGNATURE).format(
        course=course,
        place=place,
        n=rng.randint(100, 999),
        m=rng.randint(20, 90),
        w=rng.randint(2, 20),
        d=rng.randint(3, 30),
        room=rng.randint(101, 999),
        day=rng.choice("一二三四五六日"),
        hour=rng.randint(9, 20),
        name=rng.choice(TEACHERS),
    )


def draw_question(rng: random.Random, topic: Topic, course: str, place: str) -> str:
    city, district = place[:2], place[2:]
    short = place if district == AMBIGUOUS_DISTRICT else district
    named = rng.choice((place, f"{city}的{district}", short))
    return rng.choice(OPENINGS) + rng.choice(topic.questions).format(course=course, place=named)


@pytest.fixture(name="corpus", scope="module")
def fixture_corpus() -> Corpus:
    rng = random.Random(SEED)
    cells = list(itertools.product(TOPICS, COURSE_NAMES.split(), PLACE_NAMES.split()))
    rng.shuffle(cells)
    documents = tuple(
        Document(id=str(number), title=f"{course} {topic.title}", text=draw_text(rng, topic, course, place))
        for number, (topic, course, place) in enumerate(cells)
    )
    asked = rng.sample(range(len(cells)), QUESTIONS)
    questions = tuple(Question(draw_question(rng, *cells[number]), str(number)) for number in asked)
    return Corpus(documents=documents, questions=questions)


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """The index and the CPU seconds it took."""

    index: KnowledgeIndex
    cpu_s: float


@pytest.fixture(name="built", scope="module")
def fixture_built(corpus: Corpus) -> Built:
    started = time.process_time()
    index = KnowledgeIndex(corpus.documents)
    return Built(index=index, cpu_s=time.process_time() - started)


def hit_rate(questions: Sequence[Question], results: Sequence[Sequence[Passage]]) -> float:
    firsts = [result[0].id if result else None for result in results]
    hits = sum(first == question.document_id for first, question in zip(firsts, questions, strict=True))
    return hits / len(questions)


def test_corpus_is_large_distinct_and_asked_about_in_other_words(corpus: Corpus) -> None:
    # 10 topics x 50 courses x 40 places
    assert len(corpus.documents) == len({document.text for document in corpus.documents}) == 20_000
    assert all(30 <= len(document.text) <= 120 for document in corpus.documents)
    assert len({question.text for question in corpus.questions}) > 0.99 * QUESTIONS
    texts = {document.id: document.text for document in corpus.documents}
    shared = 0.0
    for question in corpus.questions:
        assert question.text not in texts[question.document_id]
        pairs = set(bigrams(question.text))
        shared += len(pairs & set(bigrams(texts[question.document_id]))) / len(pairs)
    print(f"a question shares {shared / QUESTIONS:.0%} of its pairs of characters with its document")
    assert shared < 0.6 * QUESTIONS  # on average, less than 60 % of a question's pairs of characters


def test_questions_find_their_document_first(corpus: Corpus, built: Built) -> None:
    results = [built.index.search(question.text, TOP_K, 0.0) for question in corpus.questions]
    rate = hit_rate(corpus.questions, results)
    print(f"hit@1 {rate:.2%} of {QUESTIONS} questions over {len(built.index)} documents")
    assert rate >= LEAST_HIT_RATE


def test_whole_clauses_as_words_find_next_to_nothing(corpus: Corpus) -> None:
    # bm25s's own tokenizer cuts at punctuation only: a Chinese clause is one word, and a question shares none with its
    # document. An index that no longer cut Chinese would fall this low.
    index = bm25s.BM25()
    texts = [f"{document.title}\n{document.text}" for document in corpus.documents]
    index.index(bm25s.tokenize(texts, return_ids=False, show_progress=False), show_progress=False)
    asked = bm25s.tokenize([question.text for question in corpus.questions], return_ids=False, show_progress=False)
    found = index.retrieve(asked, k=1, show_progress=False).documents[:, 0]
    hits = sum(str(at) == question.document_id for at, question in zip(found, corpus.questions, strict=True))
    print(f"hit@1 {hits / QUESTIONS:.2%} with bm25s's own tokenizer")
    assert hits < 0.05 * QUESTIONS


def test_index_is_built_in_seconds(built: Built) -> None:
    print(f"built in {built.cpu_s:.1f} CPU s")
    assert built.cpu_s < LONGEST_BUILD_S


@pytest.mark.alone
def test_a_thousand_questions_are_answered_a_second(corpus: Corpus, built: Built) -> None:
    """From the question's text to ranked ids with scores, in one thread: more than the HTTP server takes.

    What is asserted is CPU time, of the better of two passes: it leaves out the time in which other processes have the
    core. Still it grows when a neighbour shares the core's units.
    """
    seconds = []
    for _ in range(2):
        started = time.process_time()
        for question in corpus.questions:
            built.index.search(question.text, TOP_K, 0.0)
        seconds.append(time.process_time() - started)
    print(f"{QUESTIONS / min(seconds):,.0f} queries/s of CPU time")
    check_seconds(min(seconds), most=QUESTIONS / LEAST_QUERIES_PER_S)

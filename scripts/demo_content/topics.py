"""Owns the thirteen course topics: their search words and the sentence patterns of their documents.

Pattern number k in Chinese and pattern number k in English state the same facts.
"""

TOPIC_WORDS: dict[str, dict[str, str]] = {
    "price": {"zh": "学费", "en": "price"},
    "refund": {"zh": "退款", "en": "refund"},
    "schedule": {"zh": "课表", "en": "schedule"},
    "teacher": {"zh": "老师", "en": "teacher"},
    "exam": {"zh": "考试", "en": "exam"},
    "instalments": {"zh": "分期", "en": "instalments"},
    "complaint": {"zh": "投诉", "en": "complaint"},
    "certificate": {"zh": "证书", "en": "certificate"},
    "trial": {"zh": "试听", "en": "trial lesson"},
    "materials": {"zh": "教材", "en": "materials"},
    "online": {"zh": "网课", "en": "online"},
    "job": {"zh": "就业", "en": "job help"},
    "prerequisites": {"zh": "基础", "en": "prerequisites"},
}
TOPICS: list[str] = list(TOPIC_WORDS)

PATTERNS: dict[str, dict[str, list[list[str]]]] = {
    "price": {
        "zh": [
            [
                "{name}的学费是{price}元，共{hours}课时。",
                "{early_date}前报名可以减{early}元。",
                "学费里已经包含平台使用费。",
            ],
            [
                "想知道{name}的学费？",
                "全程{hours}课时，一次付清{price}元。",
                "两人一起报名，每人再减{pair}元，优惠到{early_date}为止。",
            ],
            [
                "目前{name}学费为{price}元，平均每课时{unit}元。",
                "以前的学员再报名减{early}元。",
                "学费在{early_date}之后会调整一次。",
            ],
        ],
        "en": [
            [
                "The price of {name} is {price} yuan for {hours} class hours.",
                "Sign up before {early_date} and you save {early} yuan.",
                "The price already covers the use of the learning platform.",
            ],
            [
                "What is the price of {name}?",
                "The full programme of {hours} class hours costs {price} yuan in one payment.",
                "Two people who sign up together each save {pair} yuan until {early_date}.",
            ],
            [
                "At present the price of {name} is {price} yuan, about {unit} yuan for each class hour.",
                "Former students save {early} yuan.",
                "The price will be reviewed once after {early_date}.",
            ],
        ],
    },
    "refund": {
        "zh": [
            [
                "{name}的退款规则：开课后{refund_days}天内可以全额退款。",
                "过了{refund_days}天，按没上的课时退{refund_percent}%。",
                "钱会在{refund_work}个工作日内退回原账户。",
            ],
            [
                "学员可以为{name}申请退款。",
                "上课不超过{refund_count}次，退还{refund_percent}%；超过{refund_count}次就不能退款。",
                "审核需要{refund_work}个工作日。",
            ],
            [
                "如果要办{name}退款，请在开课{refund_days}天内填写申请表。",
                "扣除{refund_charge}元手续费后，其余退款{refund_work}个工作日到账。",
            ],
        ],
        "en": [
            [
                "The refund rule of {name}: within {refund_days} days after the start you get a full refund.",
                "After {refund_days} days we return {refund_percent} percent for the hours not used.",
                "The money arrives within {refund_work} working days.",
            ],
            [
                "Students may ask for a refund of {name}.",
                "With no more than {refund_count} classes attended we return {refund_percent} percent;"
                " after {refund_count} classes no refund is possible.",
                "The check takes {refund_work} working days.",
            ],
            [
                "To get a refund for {name}, fill in the form within {refund_days} days of the start.",
                "We keep a handling charge of {refund_charge} yuan,"
                " and the rest of the refund is paid within {refund_work} working days.",
            ],
        ],
    },
    "schedule": {
        "zh": [
            [
                "{name}的课表已经排好：{start}开课，每{day1}和{day2}的{time}上课。",
                "每次{minutes}分钟，一共{weeks}周，中间不停课。",
            ],
            [
                "本期{name}课表如下：{start}开始，{weeks}周结束。",
                "{day1}和{day2}各上一次，都是{time}开始，每次{minutes}分钟。",
                "节假日停课，之后补上。",
            ],
            [
                "查看{name}的课表：固定在{day1}、{day2}的{time}，一次{minutes}分钟。",
                "第一次上课是{start}，全程{weeks}周。",
                "请假要提前{leave}小时。",
            ],
        ],
        "en": [
            [
                "The schedule of {name} is ready: it starts on {start} and meets every {day1} and {day2} at {time}.",
                "Each class lasts {minutes} minutes and the course runs {weeks} weeks without a break.",
            ],
            [
                "This is the current schedule of {name}: it starts on {start} and ends after {weeks} weeks.",
                "There is one class on {day1} and one on {day2}, both at {time}, {minutes} minutes each.",
                "Public holidays are made up later.",
            ],
            [
                "See the schedule of {name}: always {day1} and {day2} at {time}, {minutes} minutes each time.",
                "The first class is on {start} and the course takes {weeks} weeks.",
                "Tell us {leave} hours ahead if you cannot come.",
            ],
        ],
    },
    "teacher": {
        "zh": [
            [
                "{name}的老师是{teacher}，有{years}年教学经验，带过{trained}多名学员。",
                "每个班最多{group}人，课后当天答疑。",
            ],
            [
                "教{name}的老师叫{teacher}，以前在行业里工作了{years}年。",
                "上一期学员给的评分是{rating}分。",
                "老师每周留出{office}小时答疑。",
            ],
            [
                "我们为{name}安排了{teacher}老师，有{years}年经验，每班{group}人。",
                "如果想换老师，请在前{swap}次课内提出，不另外收钱。",
            ],
        ],
        "en": [
            [
                "The teacher of {name} is {teacher}, with {years} years of experience and {trained} students so far.",
                "Each group has at most {group} people, and questions are answered the same day.",
            ],
            [
                "The teacher who leads {name} is {teacher}, who worked {years} years in the trade before.",
                "The last group gave a score of {rating} out of ten.",
                "The teacher keeps {office} hours a week for questions.",
            ],
            [
                "For {name} the teacher is {teacher}, with {years} years of experience; a group has {group} people.",
                "If you want another teacher, tell us within the first {swap} classes; this is free.",
            ],
        ],
    },
    "exam": {
        "zh": [
            [
                "{name}的考试在{exam_date}举行，时长{exam_minutes}分钟，{exam_pass}分合格。",
                "没有通过可以免费再考{exam_again}次，请提前{exam_before}天登记。",
            ],
            [
                "学完{name}要参加考试，内容包括{piece}。",
                "考试费是{exam_fee}元，{exam_pass}分算通过。",
                "登记要在{exam_date}之前{exam_before}天完成。",
            ],
            [
                "关于{name}考试：一共{exam_minutes}分钟，先笔答，再完成{piece}。",
                "日期是{exam_date}，满分100分，达到{exam_pass}分合格，费用{exam_fee}元。",
            ],
        ],
        "en": [
            [
                "The exam of {name} is held on {exam_date}; it takes {exam_minutes} minutes"
                " and {exam_pass} points are a pass.",
                "If you fail, you may repeat it {exam_again} times for free. Register {exam_before} days ahead.",
            ],
            [
                "At the end of {name} there is an exam, and it includes {piece}.",
                "The exam fee is {exam_fee} yuan and {exam_pass} points are enough.",
                "Register at least {exam_before} days before {exam_date}.",
            ],
            [
                "About the {name} exam: it takes {exam_minutes} minutes, first a written part and then {piece}.",
                "The date is {exam_date}, you need {exam_pass} of 100 points, and the fee is {exam_fee} yuan.",
            ],
        ],
    },
    "instalments": {
        "zh": [
            [
                "{name}可以分期付款，最多分{parts}个月，每月{monthly}元。",
                "分期不收利息，第一笔要在{due_date}前支付。",
            ],
            [
                "报名{name}支持分期：先付{down}元，其余分{parts}个月付清。",
                "从{due_date}起每月同一天扣款，晚付一次收{refund_charge}元。",
            ],
            [
                "选择{name}分期的学员，每月付{monthly}元，共{parts}次。",
                "办理分期要身份证和银行卡，{due_date}前提交，{refund_work}天内审核。",
            ],
        ],
        "en": [
            [
                "You can pay for {name} in instalments, over at most {parts} months at {monthly} yuan a month.",
                "The instalments carry no interest, and the first one is due before {due_date}.",
            ],
            [
                "For {name} we offer instalments: pay {down} yuan first and the rest over {parts} months.",
                "The bank takes the money on the same day each month from {due_date};"
                " a late payment costs {refund_charge} yuan.",
            ],
            [
                "Students who choose instalments for {name} pay {monthly} yuan a month, {parts} times.",
                "Bring an identity card and a bank card before {due_date}; instalments are checked"
                " within {refund_work} days.",
            ],
        ],
    },
    "complaint": {
        "zh": [
            [
                "对{name}有投诉，请打{phone}，找{manager}。",
                "我们{reply}小时内回复，{solve}个工作日内给出处理结果，并写成书面记录。",
            ],
            [
                "{name}学员的投诉由{manager}负责。",
                "投诉可以打{phone}，也可以写邮件，{reply}小时内会有人联系您，最多{solve}天解决。",
            ],
            [
                "如果对{name}不满意，可以提交投诉单。",
                "{manager}会在{reply}小时内打电话了解情况，电话号码是{phone}。",
                "投诉一般{solve}天处理完。",
            ],
        ],
        "en": [
            [
                "If you have a complaint about {name}, call {phone} and ask for {manager}.",
                "We answer within {reply} hours and give a written result within {solve} working days.",
            ],
            [
                "A complaint from a student of {name} goes to {manager}.",
                "Make the complaint by phone at {phone} or by mail; someone calls you within {reply} hours"
                " and it is solved in {solve} days at most.",
            ],
            [
                "Not happy with {name}? You can hand in a complaint form.",
                "{manager} calls you from {phone} within {reply} hours to hear what happened.",
                "A complaint is usually closed in {solve} days.",
            ],
        ],
    },
    "certificate": {
        "zh": [
            [
                "{name}结业后会发证书，{cert_days}天内寄到。",
                "出勤要达到{cert_attend}%，并交出{piece}。",
                "证书工本费{cert_fee}元。",
            ],
            [
                "完成{name}可以拿到证书，上面有编号，可以在网站查询。",
                "条件是出勤{cert_attend}%以上。",
                "结业{cert_days}天后领取，补办收{cert_copy}元。",
            ],
            [
                "我们给{name}学员发中英文证书。",
                "交出{piece}、出勤达到{cert_attend}%就能申请。",
                "证书制作要{cert_days}天，费用{cert_fee}元。",
            ],
        ],
        "en": [
            [
                "After {name} you receive a certificate, sent by post within {cert_days} days.",
                "You need {cert_attend} percent attendance and must hand in {piece}.",
                "The certificate costs {cert_fee} yuan to print.",
            ],
            [
                "Those who finish {name} get a certificate with a number that can be checked on our site.",
                "You need at least {cert_attend} percent attendance.",
                "Collect it {cert_days} days after the end; a second copy costs {cert_copy} yuan.",
            ],
            [
                "We give students of {name} a certificate in Chinese and English.",
                "Hand in {piece} and reach {cert_attend} percent attendance to apply.",
                "The certificate takes {cert_days} days and costs {cert_fee} yuan.",
            ],
        ],
    },
    "trial": {
        "zh": [
            [
                "{name}可以试听，每{trial_day}一场，时长{trial_minutes}分钟，收{trial_fee}元。",
                "每场只有{trial_seats}个座位，请提前{trial_book}天预约。",
            ],
            [
                "想先试听{name}？",
                "{trial_day}有{trial_minutes}分钟的体验，由{teacher}主讲。",
                "试听收{trial_fee}元，报名后可以抵扣，提前{trial_book}天登记。",
            ],
            [
                "我们开放{name}试听，一次{trial_minutes}分钟，费用{trial_fee}元。",
                "时间是{trial_day}，最多{trial_seats}人。",
                "试听当天会带大家做一个小练习。",
            ],
        ],
        "en": [
            [
                "There is a trial lesson of {name} every {trial_day}; it lasts {trial_minutes} minutes"
                " and costs {trial_fee} yuan.",
                "There are only {trial_seats} seats, so please book {trial_book} days ahead.",
            ],
            [
                "Want a trial lesson of {name} first?",
                "On {trial_day} there is one of {trial_minutes} minutes led by {teacher}.",
                "The trial lesson costs {trial_fee} yuan, which we take off later; register {trial_book} days ahead.",
            ],
            [
                "We open a trial lesson of {name} for {trial_fee} yuan, {trial_minutes} minutes long.",
                "It is on {trial_day} for at most {trial_seats} people.",
                "In the trial lesson everyone does a small exercise.",
            ],
        ],
    },
    "materials": {
        "zh": [
            [
                "{name}的教材一共{books}本，{pages}页，另收{book_fee}元。",
                "教材在报名后{book_days}天内寄出。",
                "请自己准备{tool}。",
            ],
            [
                "学习{name}要用{books}本教材，费用{book_fee}元。",
                "还需要{tool}，可以自己带，也可以在校区借。",
                "寄送要{book_days}天。",
            ],
            [
                "{name}教材由{teacher}编写，共{pages}页，分成{books}本。",
                "电子版免费，纸质教材{book_fee}元。",
                "练习时要有{tool}。",
            ],
        ],
        "en": [
            [
                "The materials of {name} are {books} books with {pages} pages and cost {book_fee} yuan extra.",
                "The materials are sent within {book_days} days after you sign up.",
                "Please bring {tool} yourself.",
            ],
            [
                "The materials for {name} are {books} books for {book_fee} yuan.",
                "You also need {tool}, your own or one borrowed on campus.",
                "The parcel takes {book_days} days to arrive.",
            ],
            [
                "The materials of {name} were written by {teacher}: {pages} pages in {books} books.",
                "The digital version is free, printed materials cost {book_fee} yuan.",
                "For practice you need {tool}.",
            ],
        ],
    },
    "online": {
        "zh": [
            [
                "{name}有网课，占全部课时的{online_percent}%，其余在校区{room}教室上。",
                "网课可以回看{replay}天，同时用{device}台设备登录。",
            ],
            [
                "不能到校的学员可以选{name}网课。",
                "直播之后{replay}天内随时回看。",
                "实操部分占{online_other}%，要到{room}教室完成。",
            ],
            [
                "{name}分网课和面授两种。",
                "网课最多用{device}台设备，回看期{replay}天；面授在{room}教室，每班{group}人。",
                "中途可以换一次。",
            ],
        ],
        "en": [
            [
                "You can take {name} online for {online_percent} percent of the hours;"
                " the rest is in room {room} on campus.",
                "The online part can be replayed for {replay} days on {device} devices.",
            ],
            [
                "Students who cannot come may take {name} online.",
                "Each live class can be replayed for {replay} days.",
                "The practical part, {online_other} percent, is not online and takes place in room {room}.",
            ],
            [
                "There is {name} online and {name} on campus.",
                "The online version works on {device} devices with {replay} days of replay; on campus you are"
                " in room {room} with {group} people. You may switch once.",
            ],
        ],
    },
    "job": {
        "zh": [
            [
                "{name}提供就业服务，可以推荐做{role}。",
                "合作公司有{partners}家，上一期就业率{placed}%。",
                "我们帮您改{resume}次简历。",
            ],
            [
                "学完{name}，就业方向主要是{role}，起薪约{pay}元。",
                "就业顾问会安排{resume}次模拟面试，合作公司{partners}家。",
            ],
            [
                "{name}的就业情况：{placed}%的学员三个月内找到工作，多数做{role}。",
                "平均月薪{pay}元。",
                "就业推荐不另外收钱。",
            ],
        ],
        "en": [
            [
                "With {name} you get job help and can be proposed as a {role}.",
                "We work with {partners} companies, and {placed} percent of the last group found a place.",
                "The job help includes {resume} reviews of your CV.",
            ],
            [
                "The job help after {name} leads to work as a {role}, with a first pay of about {pay} yuan.",
                "An adviser holds {resume} practice interviews, and {partners} companies take part in the job help.",
            ],
            [
                "About job help for {name}: {placed} percent of students find a post within three months,"
                " most as a {role}.",
                "The average pay is {pay} yuan a month. The job help is free.",
            ],
        ],
    },
    "prerequisites": {
        "zh": [
            [
                "{name}不要求基础，新手也能报名。",
                "开课前有{pre_videos}个入门视频，每周自学{self_hours}小时就能跟上。",
                "请准备好{tool}。",
            ],
            [
                "学{name}需要什么基础？",
                "先做{test_minutes}分钟的小测，分数低也可以从第一级开始。",
                "建议每周练习{self_hours}小时。",
            ],
            [
                "没有基础也可以学{name}。",
                "我们送{pre_videos}个入门视频，看完再做{test_minutes}分钟小测。",
                "有基础的学员可以跳过前{swap}次课。",
            ],
        ],
        "en": [
            [
                "There are no prerequisites for {name}, and beginners are welcome.",
                "Before the start you get {pre_videos} short videos; with {self_hours} hours of practice a week"
                " you can keep up. Please have {tool} ready.",
            ],
            [
                "What are the prerequisites of {name}?",
                "You take a check of {test_minutes} minutes, and even with a low score you can begin at level one.",
                "We advise {self_hours} hours of practice a week.",
            ],
            [
                "You can begin {name} without prerequisites.",
                "We give you {pre_videos} short videos and then a check of {test_minutes} minutes.",
                "If you know a lot already, skip the first {swap} classes.",
            ],
        ],
    },
}


def canonical_query(course_name: str, topic: str, lang: str) -> str:
    """Return the one good search query of a course and topic in a language."""
    return f"{course_name} {TOPIC_WORDS[topic][lang]}"

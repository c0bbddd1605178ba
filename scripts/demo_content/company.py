"""Owns the documents that belong to no single course: company facts and offers for special audiences."""

# (slug, topic, {"zh": (title, sentences), "en": (title, sentences)})
Entry = tuple[str, str, dict[str, tuple[str, list[str]]]]

GENERAL: list[Entry] = [
    (
        "about",
        "company",
        {
            "zh": (
                "公司介绍",
                ["明学堂成立于2009年，专门做成人职业和兴趣教学。", "目前有3个校区、86名员工，累计服务学员41000人。"],
            ),
            "en": (
                "About the company",
                [
                    "Mingxue School was founded in 2009 and serves adults who study for work or as a hobby.",
                    "Today it has 3 campuses, 86 employees and 41000 former students.",
                ],
            ),
        },
    ),
    (
        "campus-hangzhou",
        "address",
        {
            "zh": (
                "杭州校区地址",
                ["杭州校区在文三路188号5楼，靠近地铁2号线学院路站B口。", "校区有12间教室，楼下停车每小时6元。"],
            ),
            "en": (
                "Hangzhou campus address",
                [
                    "The Hangzhou campus is at 188 Wensan Road, 5th floor, near exit B of Xueyuan Road station on"
                    " metro line 2.",
                    "It has 12 rooms, and parking below costs 6 yuan an hour.",
                ],
            ),
        },
    ),
    (
        "campus-nanjing",
        "address",
        {
            "zh": (
                "南京校区地址",
                [
                    "南京校区在中山路75号3楼，从地铁1号线珠江路站步行4分钟。",
                    "校区有9间教室和1间自习室，自习室可坐40人。",
                ],
            ),
            "en": (
                "Nanjing campus address",
                [
                    "The Nanjing campus is at 75 Zhongshan Road, 3rd floor, a walk of 4 minutes from Zhujiang Road"
                    " station on metro line 1.",
                    "It has 9 rooms and a reading room with 40 seats.",
                ],
            ),
        },
    ),
    (
        "campus-suzhou",
        "address",
        {
            "zh": (
                "苏州校区地址",
                [
                    "苏州校区在人民路320号，公交8路和26路在门口停。",
                    "2021年启用，一楼是厨房和工作间，二楼是7间普通教室。",
                ],
            ),
            "en": (
                "Suzhou campus address",
                [
                    "The Suzhou campus is at 320 Renmin Road, where bus 8 and bus 26 stop at the door.",
                    "It opened in 2021 with kitchens and workshops downstairs and 7 plain rooms upstairs.",
                ],
            ),
        },
    ),
    (
        "contact",
        "contact",
        {
            "zh": (
                "联系方式",
                [
                    "咨询电话是400-8100，每天8:30到21:00有人接听。",
                    "也可以加微信号mingxue01，或者发邮件到hello@mingxue.example。",
                ],
            ),
            "en": (
                "How to contact us",
                [
                    "Our phone number is 400-8100, answered every day from 8:30 to 21:00.",
                    "You can also add mingxue01 on WeChat or write a mail to hello@mingxue.example at any time.",
                ],
            ),
        },
    ),
    (
        "opening-hours",
        "hours",
        {
            "zh": (
                "校区开放时间",
                [
                    "三个校区周一到周五9:00开门，22:00关门。",
                    "周末8:30开门，21:30关门。",
                    "春节期间关闭10天，具体安排提前30天公布。",
                ],
            ),
            "en": (
                "Opening hours",
                [
                    "The three campuses open at 9:00 and close at 22:00 on working days.",
                    "At the weekend they open from 8:30 to 21:30.",
                    "They close 10 days for the Spring Festival, announced 30 days before.",
                ],
            ),
        },
    ),
    (
        "privacy",
        "privacy",
        {
            "zh": (
                "隐私说明",
                [
                    "我们只保存姓名、电话和订单，保存期为24个月。",
                    "您可以发邮件要求删除，我们会在15天内完成。",
                    "资料不会卖给其他公司。",
                ],
            ),
            "en": (
                "Privacy notice",
                [
                    "We keep only your name, phone number and orders, for 24 months.",
                    "You may write to us to have them deleted, which we do within 15 days.",
                    "Your data is never sold to another company.",
                ],
            ),
        },
    ),
    (
        "invoice",
        "invoice",
        {
            "zh": (
                "发票开具",
                [
                    "付款后可以在网站开电子发票，抬头写个人或者公司都可以。",
                    "发票3个工作日内发到邮箱，纸质发票另收8元邮费。",
                ],
            ),
            "en": (
                "Invoices",
                [
                    "After paying you can request an invoice on our site, in your own name or in that of a company.",
                    "The invoice reaches your mailbox within 3 working days; on paper it costs 8 yuan postage.",
                ],
            ),
        },
    ),
    (
        "payment",
        "payment",
        {
            "zh": (
                "付款方式",
                [
                    "支持微信、支付宝、银行卡和对公转账四种付款方式。",
                    "转账请写清订单号，1个工作日内到账。",
                    "校区前台不收现金。",
                ],
            ),
            "en": (
                "Ways of payment",
                [
                    "We accept WeChat, Alipay, bank cards and company transfers.",
                    "Please write the order number on a transfer; it arrives within 1 working day.",
                    "The front desk on campus does not accept cash.",
                ],
            ),
        },
    ),
    (
        "app",
        "app",
        {
            "zh": (
                "手机应用",
                [
                    "明学堂应用支持安卓9和苹果14以上系统，大小约85兆。",
                    "登录后可以打卡、交作业和收通知，密码忘了用手机号找回。",
                ],
            ),
            "en": (
                "Mobile app",
                [
                    "The Mingxue app needs Android 9 or iOS 14 and takes about 85 megabytes.",
                    "After logging in you can check in, hand in homework and read notices; reset the password"
                    " with your phone number.",
                ],
            ),
        },
    ),
    (
        "referral",
        "referral",
        {
            "zh": (
                "推荐好友奖励",
                [
                    "推荐一位好友报名，双方各得150元代金券，有效期180天。",
                    "一年内最多领取6张，代金券不能换现金，也不能转给别人。",
                ],
            ),
            "en": (
                "Bring a friend",
                [
                    "For each friend who signs up, you and the friend both get a voucher of 150 yuan, valid 180 days.",
                    "You can earn at most 6 vouchers a year, and they cannot be changed into cash.",
                ],
            ),
        },
    ),
    (
        "enrol",
        "enrol",
        {
            "zh": (
                "报名流程",
                [
                    "报名分三步：在网站填表、顾问电话确认、在线签合同。",
                    "整个过程约20分钟，合同签好后2小时内开通账号。",
                    "名额保留48小时。",
                ],
            ),
            "en": (
                "How to enrol",
                [
                    "You enrol in three steps: fill in the form on our site, confirm by phone, sign the contract.",
                    "This takes about 20 minutes; your account opens within 2 hours and the seat is kept 48 hours.",
                ],
            ),
        },
    ),
]

# Two offers per audience; each is valid for one half of the courses.
AUDIENCE: list[Entry] = [
    (
        "seniors",
        "package",
        {
            "zh": ("老年学员套餐", ["老年学员套餐给60岁以上的老人，老年优惠减800元。", "老年班每班8人，讲得慢。"]),
            "en": (
                "Senior learners' package",
                [
                    "The senior learners' package gives seniors of 60 years old a senior discount of 800 yuan.",
                    "Groups for seniors have 8 people.",
                ],
            ),
        },
    ),
    (
        "pensioner",
        "discount",
        {
            "zh": (
                "退休人员优惠",
                ["退休人员优惠给已经退休的老人，老年证有效，打7折。", "退休老年学员每周二上午到校。"],
            ),
            "en": (
                "Pensioner discount",
                [
                    "Each retired person and pensioner gets the pensioner discount for seniors, 30 percent off.",
                    "Retired seniors come on Tuesday mornings.",
                ],
            ),
        },
    ),
    (
        "midlife",
        "package",
        {
            "zh": ("中年转行套餐", ["中年转行套餐给35岁到59岁的中年学员，中年优惠减500元。", "大龄学员另送4次辅导。"]),
            "en": (
                "Middle-aged switch package",
                [
                    "The middle-aged switch package is for middle-aged people of 35 to 59 years old, with a"
                    " middle-aged discount of 500 yuan.",
                    "It adds 4 coaching hours.",
                ],
            ),
        },
    ),
    (
        "youth",
        "package",
        {
            "zh": (
                "年轻人套餐",
                ["年轻人套餐给18岁到30岁的年轻人，青年优惠减260元。", "年轻人可以组队学习，每队5人。"],
            ),
            "en": (
                "Young people's package",
                [
                    "The young people's package is for young people of 18 to 30 years old, with a young people"
                    " discount of 260 yuan.",
                    "Young people may study in teams of 5.",
                ],
            ),
        },
    ),
    (
        "women-return",
        "package",
        {
            "zh": (
                "女性重返职场计划",
                ["女性重返职场计划给女性、女生和女士，女性优惠减680元。", "每周有1次女性交流会。"],
            ),
            "en": (
                "Women returning to work plan",
                [
                    "The women returning to work plan gives every woman a women discount of 680 yuan.",
                    "Each week the women meet once; a woman may bring a friend.",
                ],
            ),
        },
    ),
    (
        "women-evening",
        "package",
        {
            "zh": (
                "女性专属班",
                ["女性专属班只收女性，女生、女士和女的都可以来，女性优惠9折。", "班里最多12名女性。"],
            ),
            "en": (
                "Women's evening group",
                [
                    "This evening group takes women only: each woman gets a women discount of 10 percent.",
                    "At most 12 women are in a group for women.",
                ],
            ),
        },
    ),
    (
        "men-evening",
        "package",
        {
            "zh": (
                "男士夜校套餐",
                ["男士夜校套餐给男性、男生和男士，男性优惠减220元。", "男士班在21:00下课，每班15名男性。"],
            ),
            "en": (
                "Men's night package",
                [
                    "The men's night package gives every man a men discount of 220 yuan.",
                    "The group for men has 15 men and ends at 21:00, so a man can work late.",
                ],
            ),
        },
    ),
    (
        "men-weekend",
        "package",
        {
            "zh": (
                "男性周末班",
                ["男性周末班只收男性，男士、男生和男的都可以来，男性优惠9折。", "每个男性班配2名助教。"],
            ),
            "en": (
                "Men's weekend group",
                [
                    "The men's weekend group takes men only: each man gets a men discount of 10 percent.",
                    "Each group of men has 2 assistants for the men.",
                ],
            ),
        },
    ),
    (
        "minority",
        "package",
        {
            "zh": (
                "少数民族学员套餐",
                ["少数民族优惠给回族、藏族、维吾尔族、蒙古族和壮族学员，减900元。", "少数民族学员有双语助教。"],
            ),
            "en": (
                "Minority students' package",
                [
                    "The minority students' package gives each minority, Tibetan, Uyghur, Hui, Mongolian or Zhuang,"
                    " a minority discount of 900 yuan.",
                    "It includes a helper for minority languages.",
                ],
            ),
        },
    ),
    (
        "minority-grant",
        "grant",
        {
            "zh": (
                "少数民族助学金",
                ["回族、藏族、蒙古族、维吾尔族、壮族等少数民族学员可以领1200元助学金。", "少数民族优惠每年6月申请。"],
            ),
            "en": (
                "Minority grant",
                [
                    "A minority student, Hui, Uyghur, Zhuang, Mongolian or Tibetan, can get a minority grant of"
                    " 1200 yuan.",
                    "The minority discount is requested each June.",
                ],
            ),
        },
    ),
    (
        "faith",
        "package",
        {
            "zh": (
                "信教学员套餐",
                ["信教学员套餐给穆斯林、基督徒和信佛的学员，信教优惠减350元。", "穆斯林学员有清真餐。"],
            ),
            "en": (
                "Faith learners' package",
                [
                    "The faith learners' package gives each Muslim, Christian, Buddhist or Hindu a faith discount of"
                    " 350 yuan.",
                    "There are halal meals for every Muslim.",
                ],
            ),
        },
    ),
    (
        "faith-hours",
        "package",
        {
            "zh": (
                "信教学员专属时段",
                ["穆斯林、信佛的学员和基督徒可以选信教专属时段。", "信教优惠9折，礼拜当天不排课，全年可以换6次。"],
            ),
            "en": (
                "Faith learners' hours",
                [
                    "A Buddhist, Hindu, Christian or Muslim may choose special faith hours with a faith discount of"
                    " 10 percent.",
                    "Days of worship are free, 6 times a year.",
                ],
            ),
        },
    ),
    (
        "disabled",
        "package",
        {
            "zh": (
                "残疾学员套餐",
                ["残疾学员套餐给残疾、坐轮椅和听力残疾的学员，残疾优惠减1000元。", "校区有轮椅通道。"],
            ),
            "en": (
                "Disabled learners' package",
                [
                    "The disabled learners' package is for disabled people, deaf or in a wheelchair, with a disabled"
                    " discount of 1000 yuan.",
                    "A wheelchair path is ready.",
                ],
            ),
        },
    ),
    (
        "disabled-help",
        "grant",
        {
            "zh": (
                "残疾学员帮扶",
                ["聋人、坐轮椅或腿有残疾的学员可以申请残疾帮扶，补1500元。", "残疾优惠凭残疾证办理。"],
            ),
            "en": (
                "Support for disabled learners",
                [
                    "Anyone disabled, in a wheelchair or deaf can ask for disabled support of 1500 yuan.",
                    "The disabled discount needs a disabled card. Deaf students get subtitles.",
                ],
            ),
        },
    ),
    (
        "mothers",
        "package",
        {
            "zh": (
                "妈妈学员套餐",
                ["妈妈学员套餐给宝妈、全职妈妈和单亲妈妈，妈妈优惠减600元。", "有孩子的妈妈可以用托管室。"],
            ),
            "en": (
                "Mothers' package",
                [
                    "The mothers' package gives each mother, single mother or housewife a parents discount of 600"
                    " yuan.",
                    "A mother can leave children in a play room.",
                ],
            ),
        },
    ),
    (
        "parents",
        "package",
        {
            "zh": (
                "年轻父母套餐",
                ["年轻父母套餐给有孩子的爸爸妈妈，父母优惠减450元。", "单亲妈妈、单亲爸爸、宝妈和全职妈妈再减100元。"],
            ),
            "en": (
                "Young parents' package",
                [
                    "The young parents' package gives each mother or father a parents discount of 450 yuan.",
                    "A single mother, single father or housewife with children saves 100 more.",
                ],
            ),
        },
    ),
    (
        "married",
        "package",
        {
            "zh": (
                "已婚夫妻套餐",
                ["已婚夫妻套餐给已婚学员，夫妻优惠两人减770元。", "离异和丧偶的学员可以改选离异关怀班。"],
            ),
            "en": (
                "Married couples' package",
                [
                    "The married couples' package gives married people a couples discount of 770 yuan for two.",
                    "Divorced people, a widow or a widower choose the divorced group.",
                ],
            ),
        },
    ),
    (
        "divorced",
        "package",
        {
            "zh": (
                "离异学员关怀班",
                ["离异学员关怀班给离异、丧偶的学员，离异优惠减330元。", "已婚学员请看夫妻班，已婚优惠另算。"],
            ),
            "en": (
                "Group for divorced learners",
                [
                    "This group is for divorced people and for a widow or widower, with a divorced discount of 330"
                    " yuan.",
                    "Married people see the couples discount for married learners.",
                ],
            ),
        },
    ),
    (
        "expecting",
        "package",
        {
            "zh": ("孕期学员安排", ["孕期学员安排给怀孕和休产假的学员，孕期优惠减550元。", "怀孕期间可以暂停180天。"]),
            "en": (
                "Plan for pregnant learners",
                [
                    "This plan is for pregnant learners and those on maternity leave, with a pregnant learners"
                    " discount of 550 yuan.",
                    "If pregnant, you may pause 180 days.",
                ],
            ),
        },
    ),
    (
        "maternity",
        "package",
        {
            "zh": (
                "产假学习套餐",
                ["产假学习套餐给休产假或怀孕的学员，孕期优惠打8折。", "产假期间每天学1小时，怀孕学员可以躺着听。"],
            ),
            "en": (
                "Maternity leave package",
                [
                    "The maternity leave package is for learners on maternity leave or pregnant, with a maternity"
                    " discount of 20 percent.",
                    "Pregnant learners study 1 hour a day.",
                ],
            ),
        },
    ),
    (
        "hukou",
        "grant",
        {
            "zh": (
                "外地户口学员补贴",
                ["外地户口学员补贴给外地人，河南人、东北人和新疆人都可以领400元。", "外地优惠要看户口本。"],
            ),
            "en": (
                "Out-of-town hukou grant",
                [
                    "The hukou grant of 400 yuan is for a migrant worker from Henan, Xinjiang or Northeast China.",
                    "The migrant discount needs a hukou book.",
                ],
            ),
        },
    ),
    (
        "migrant",
        "package",
        {
            "zh": (
                "外地人套餐",
                ["外地人套餐给东北人、河南人、新疆人等外地户口学员，外地优惠减240元。", "外地人可以住校区宿舍。"],
            ),
            "en": (
                "Migrant workers' package",
                [
                    "The migrant package gives each migrant worker from Northeast China, Henan or Xinjiang a migrant"
                    " discount of 240 yuan.",
                    "Those without a city hukou get a bed.",
                ],
            ),
        },
    ),
    (
        "rural",
        "grant",
        {
            "zh": (
                "农村学员补贴",
                ["农村学员补贴给农村户口的学员，农村优惠减700元。", "从农村来的学员可以领车票，最多3张。"],
            ),
            "en": (
                "Rural learners' grant",
                [
                    "The rural learners' grant gives people from the countryside or with a rural hukou a rural"
                    " discount of 700 yuan.",
                    "Rural learners get up to 3 train tickets.",
                ],
            ),
        },
    ),
    (
        "rural-youth",
        "package",
        {
            "zh": (
                "农村返乡套餐",
                ["农村返乡套餐给有农村户口、想回农村开店的学员，农村优惠打8折。", "农村学员有2次上门指导。"],
            ),
            "en": (
                "Back to the countryside package",
                [
                    "This package is for rural people, with a rural hukou or from the countryside, with a rural"
                    " discount of 20 percent.",
                    "Rural learners get 2 visits.",
                ],
            ),
        },
    ),
]

# Sentences that list the courses of an audience offer; {courses} is a list of names.
AUDIENCE_TAIL: dict[str, list[str]] = {
    "zh": ["适用：{courses}。", "可以选{courses}。", "包括{courses}。"],
    "en": ["Valid for {courses}.", "Choose {courses}.", "It covers {courses}."],
}

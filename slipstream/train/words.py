"""Words for the requests of `requests.py`: what people ask about. A list is one text, its entries are split by `;`."""

from __future__ import annotations

import re

from slipstream.text import Tokenizer

_TEXTS = {
    "person": """
        Anna Berg; Carlos Mendes; Priya Nair; Daniel Okafor; Sofia Rossi; Kenji Tanaka; Laura Schmidt; Omar
        Haddad; Emily Carter; Ivan Novak; Grace Kim; Peter Larsen; Fatima Zahra; Lucas Martin; Helen Brooks;
        Samuel Osei
    """,
    "name": """
        Ben; Clara; David; Eva; Felix; Greta; Hugo; Ines; Jonas; Kate; Leo; Mia; Nora; Oscar; Rosa; Sam;
        Tina; Victor; Mr. Adams; Mrs. Lopez
    """,
    "city": """
        Lisbon; Chicago; Nairobi; Kyoto; Vienna; Toronto; Cairo; Mumbai; Oslo; Buenos Aires; Seoul; Prague;
        Dublin; Sydney; Istanbul; Lima; Athens; Boston; Hanoi; Edinburgh
    """,
    "country": """
        Japan; Brazil; Egypt; Canada; India; Norway; Mexico; Kenya; Italy; Thailand; Peru; Greece; Morocco;
        Iceland; New Zealand; Turkey; Vietnam; Argentina; Poland; South Africa; Spain; Ireland; Indonesia;
        Chile
    """,
    "animal": """
        an octopus; a penguin; an elephant; a bat; a honeybee; a wolf; a dolphin; a camel; an owl; a spider;
        a tortoise; a chameleon; a giraffe; an ant; a shark; a squirrel; a parrot; a hedgehog; a kangaroo; a
        beaver; a butterfly; a crocodile; a horse; a salmon; a firefly; a koala; a raven; a whale; a goat; a
        lizard
    """,
    "creature": """
        a dragon; a talking cat; a lonely ghost; a young wizard; a mermaid; a shy giant; a lost astronaut;
        an old gardener; a brave mouse; a detective; a street musician; a lighthouse keeper; a small robot;
        a princess; a thief; a beekeeper; a schoolteacher; a blind painter; a time traveller; a librarian; a
        baker; a shepherd; a pirate captain;  a night watchman; a runaway horse; a puppet; an
        inventor; a fisherman's daughter; a retired spy
    """,
    "deed": """
        finds a map in an old book; cannot tell a lie; wants to touch the moon; loses a precious ring; is
        afraid of the dark; builds a boat in the desert; hears music that nobody else can hear; wakes up in
        the wrong century; has to guard an empty castle; makes friends with an enemy; opens a shop for
        dreams; follows a strange light into the forest; learns to forgive; must choose between two homes;
        receives a letter without a sender; saves a town from a flood; trades a voice for wings; plants a
        seed that grows overnight; discovers a hidden city under the sea; returns after twenty years;
        teaches a bear to dance; has one day left to keep a promise; meets a stranger on a train; forgets
        everything at midnight
    """,
    "thing": """
        an old bridge; the desert at night; a summer thunderstorm; a broken piano; the colour blue; a
        harbour; my grandmother's kitchen; the city after the rain; a long train ride; a candle; falling
        stars; an empty playground; the first day of school; a river; a garden in spring; a forgotten
        photograph; silence; the wind in the mountains; a lost umbrella; hope; growing old; a wooden chair;
        a cup of coffee; the last day of summer; friendship; a paper boat; a lighthouse
    """,
    "concept": """
        photosynthesis; gravity; democracy; blockchain; evolution; plate tectonics; machine learning; supply
        and demand; the immune system; electricity; DNA; compound interest; the greenhouse effect; black
        holes; the water cycle; recursion; probability; the Big Bang; human rights; globalization; cloud
        computing; the nervous system; nuclear energy; magnetism; the stock market; osmosis; the scientific
        method; cryptography; the food chain; fractions; the Roman Empire; vaccination; object-oriented
        programming; the solar system; natural selection; entropy; the placebo effect; opportunity cost; the
        Renaissance; sound waves; biodiversity; quantum mechanics; the digestive system; metaphors; prime
        numbers; erosion; the Industrial Revolution; mindfulness; bacteria; an algorithm; taxes; mitosis;
        the Cold War; renewable energy; irony; photography; the periodic table; acid rain; the speed of
        light; monopolies; the carbon cycle; artificial intelligence; a balanced diet; the human eye;
        insurance; tectonic faults; the internet; neurons; the water table; feudalism; a mortgage;
        symbiosis; the electoral college; antibiotics; calculus; dark matter; the Silk Road trade; a budget;
        hormones; stereotypes; the rule of law; fossils; friction; jazz; impressionism; version control; a
        database index; the ozone layer; coral reefs; peer pressure; bankruptcy; the tides; chemical bonds;
        a hash table; utilitarianism; the heart; satire; lasers; open-source software; the lungs; genetic
        engineering
    """,
    "audience": """
        a child; a beginner; a high school student; my grandfather; someone who has never heard of it; a
        busy manager; an engineer; a class of twelve-year-olds
    """,
    "device": """
        a microwave oven; a jet engine; a compass; a washing machine; a telescope; a solar panel; a
        thermostat; a submarine; a smoke detector; a printer; a touch screen; a vacuum cleaner; a hearing
        aid; a wind turbine; a lock; an elevator; a camera; a pacemaker; GPS; a hot air balloon; a battery;
        an airbag; a piano; a 3D printer; Wi-Fi; a barcode scanner; a pressure cooker; a dishwasher; a
        hybrid car; a lie detector; a sewing machine; a metal detector; a drone; a stethoscope; an induction
        stove; a violin; a fire extinguisher; a heat pump; a satellite; a parachute; a zipper; an MRI
        scanner; a radio; a bicycle gear; a water filter; a speaker; an electric guitar; a clock; a crane; a
        helicopter
    """,
    "activity": """
        cooking for a large family; public speaking; saving money; running a marathon; taking better
        photographs; raising a puppy; studying for exams; moving to another country; growing tomatoes;
        writing a novel; losing weight; travelling alone; playing the guitar; managing stress; making new
        friends; job interviews; painting a room; swimming; reading more books; starting a small business;
        driving in winter; caring for houseplants; hiking in the mountains; negotiating a salary; drawing
        portraits; organizing a wedding; baking bread; playing chess; teaching children; repairing clothes;
        meditation; working in a team; gardening on a balcony; camping with children; giving feedback;
        buying a house; time management; learning to dance; fishing; writing poems; watching birds; keeping
        bees; knitting; playing the piano; yoga; sailing; paying off debts; living with flatmates; shopping
        for groceries; rock climbing; speed reading; planning a garden; training a dog; editing texts;
        photography at night; cycling to work; hosting guests; dealing with difficult customers; learning to
        program; making videos; staying healthy in the office; remembering names; travelling with a baby;
        writing a thesis; recycling; cleaning windows; raising chickens; collecting stamps; helping a friend
        who is sad; waking up early; skiing; selling things online; reading sheet music
    """,
    "task": """
        change a flat tyre; clean a cast-iron pan; tie a tie; write a good CV; remove a coffee stain; set up
        a home network; make yoghurt; fold a fitted sheet; plant an apple tree; back up photos; boil an
        egg; choose a laptop; stop a nosebleed; sharpen a knife; meditate; start a podcast; iron a shirt;
        cut an onion without crying; calm a crying baby; build a bookshelf; read a map; make friends at
        work; get rid of ants; apply for a passport; keep a diary; fix a dripping tap; make a paper plane;
        train for a 10-kilometre run; store fresh herbs; say no politely; plan a birthday party; edit a
        video; grow mushrooms; save water at home; learn to juggle; take care of a cactus; prepare for a
        hurricane; write a business plan; open a bank account; clean a keyboard; bake a cake without eggs;
        choose a good melon; make a budget; dye a shirt; learn touch typing; wrap a present; prepare a
        presentation; dry flowers; hang a picture; keep a cat off the table; pack a suitcase; make soap;
        find a mentor; write a will; measure a room; keep a good posture; deal with a bully; test a battery;
        pick a paint colour; paint a wall; peel garlic; feed birds in winter; make ice cream; prune roses;
        stay awake at work; check the oil of a car; sell a used phone; grow a beard; get over a cold; cook
        rice; whistle with two fingers; build a campfire; learn a poem by heart; find cheap flights
    """,
    "why": """
        the sky is blue; cats purr; bread rises; the moon has phases; we dream; ice floats on water; salt
        melts ice; birds migrate; onions make us cry; the sea has tides; people yawn; metal feels colder
        than wood; stars twinkle; volcanoes erupt; leaves are green; we need vitamins; some people are
        left-handed; airplanes can fly; honey does not spoil; thunder follows lightning; time zones exist;
        deserts are cold at night; dogs wag their tails; soap cleans; earthquakes happen; languages die out;
        bees dance; our hearts beat faster when we are afraid; popcorn pops; empires fall; prices rise; we
        get goosebumps; mirrors reverse left and right; flamingos are pink; glass is transparent; we forget
        our dreams; the Earth is round; milk turns sour; cities grow near rivers; rainbows appear; hot air
        rises; humans cook their food; trees lose water; iron rusts; spiders make webs; we age; music makes
        us happy; the days get shorter; snow is white; planets orbit the sun; cars need oil; chameleons
        change colour; some words have silent letters; money has value; muscles get sore; wood burns; water
        boils at lower temperatures in the mountains
    """,
    "food": """
        lentil soup; pancakes; vegetable curry; apple pie; chicken stew; fried rice; tomato sauce; banana
        bread; a bean salad; mushroom risotto; fish tacos; potato gratin; chocolate cookies; an omelette;
        hummus; pizza dough; dumplings; ratatouille; oatmeal; a green smoothie; beef stew; pumpkin soup;
        garlic bread; cheesecake
    """,
    "option": """
        renting a flat; electric cars; homeschooling; online shopping; living in a big city; social media;
        nuclear power; a vegetarian diet; studying abroad; keeping a dog; public transport; video games;
        school uniforms; credit cards; small companies; paper books; open offices; tourism; fast food; zoos;
        artificial intelligence in medicine; early retirement; being self-employed; buying second-hand
        clothes; a four-day week
    """,
    "pair": """
        a crocodile and an alligator; mass and weight; a lake and a pond; tea and coffee; a simile and a
        metaphor; speed and velocity; a virus and a bacterium; Java and JavaScript; a list and a tuple in
        Python; stocks and bonds; butter and margarine; a comet and an asteroid; a hurricane and a tornado;
        an acid and a base; jam and jelly; empathy and sympathy; RAM and ROM; HTTP and HTTPS; a republic and
        a monarchy; a moth and a butterfly; a novel and a novella; mean and median; TCP and UDP; a seal and
        a sea lion; revenue and profit; a cello and a violin; equality and equity; a hypothesis and a
        theory; an atom and a molecule; copyright and a patent; fog and mist; SQL and NoSQL; cement and
        concrete; a psychologist and a psychiatrist; stalactites and stalagmites; renting and leasing; a
        fruit and a vegetable; heat and temperature; a frog and a toad; a loan and a grant; baking soda and
        baking powder; a compiler and an interpreter; a solicitor and a barrister; an introvert and an
        extrovert; a planet and a star; a process and a thread; a marathon and a triathlon; a donkey and a
        mule; a fact and an opinion; an opera and a musical; a city and a town; affect and effect; a rock
        and a mineral; a debit card and a credit card; a sonata and a symphony; broadband and fibre; a nut
        and a seed; a refugee and a migrant
    """,
    "job": """
        a nurse; a software developer; a waiter; an accountant; a teacher; an electrician; a graphic
        designer; a sales manager; a librarian; a truck driver; a gardener; a journalist; a pharmacist; a
        receptionist; a data analyst; a carpenter; a tour guide; a chef; a mechanic; a translator
    """,
    "matter": """
        a late delivery; a wrong invoice; a noisy construction site; a day off next week; a broken heater; a
        missed appointment; a lost parcel; a change of the schedule; a new colleague; a raise; a meeting
        room; a cancelled flight; a school trip; a refund; a recommendation; an invitation to dinner; a job
        offer; a misunderstanding; the summer party; a forgotten birthday; a software update; a parking
        space; feedback on a report
    """,
    "recipient": """
        my landlord; a customer; my boss; a former teacher; a hotel; my neighbours; the support team of a
        shop; a colleague; an old friend; the city council; my insurance company; a new client; my team; a
        professor; my sister; the school
    """,
    "function": """
        reverses a string; finds the largest number in a list; checks whether a word is a palindrome; counts
        the vowels in a text; merges two sorted lists; removes duplicates from a list; converts Celsius to
        Fahrenheit; computes the factorial of a number; sorts a list of dictionaries by a key; finds all
        prime numbers up to n; checks whether a year is a leap year; computes the greatest common divisor;
        validates an e-mail address; flattens a nested list; generates a random password; finds the most
        frequent element; calculates the area of a circle; rotates a matrix by 90 degrees; searches a sorted
        list with binary search; parses a date; checks whether brackets are balanced; splits a list into
        chunks; computes the median; converts a number to binary; finds the longest word in a sentence;
        transposes a matrix; rounds prices; reads a text file line by line; writes a dictionary to a JSON
        file; groups people by age; computes the distance between two points; swaps keys and values; caches
        results; retries a request; capitalizes every word; finds missing numbers; shuffles cards; encodes a
        text with a Caesar cipher; checks whether two words are anagrams; computes a moving average; draws a
        triangle of stars
    """,
    "program": """
        a number guessing game; a to-do list; a simple calculator; a bank account; a temperature converter;
        a tic-tac-toe game; a quiz with three questions; a shopping cart; a linked list; a queue; a library
        with books and members; a timer; a phone book; a dice roller; a binary tree; a parking lot; an
        inventory; a chat room; a student with grades; a vending machine; a matrix; a playlist; a ticket
        system; a hotel reservation; a graph; a game of hangman; a weather station; an elevator
    """,
    "language": "Python; Python; Python; JavaScript; Java; C; C++; Go; Rust; Ruby; TypeScript; PHP; Bash; C#",
    "query": """
        lists all products that were never sold; counts the users per country; finds the second highest
        salary; updates the price of all books by 5 percent; deletes accounts without a login since 2020;
        joins authors with their books; shows the monthly revenue; finds duplicate e-mail addresses; selects
        the newest order of every customer; creates a table of students with name, age and grade; lists
        departments with more than ten employees; computes the average rating of each film; finds employees
        who were hired last year; inserts three rows into a table of cities
    """,
    "entity": """
        a film; a car; a restaurant; a university course; a pet; a smartphone; a song; a football player; a
        hotel; a recipe; a city; an invoice; a weather report; a plane ticket; a museum; an employee; a
        board game; a concert; a plant; a laptop; a customer; a train connection; a painting; a library; a
        planet; a bank transfer; a podcast; a running shoe
    """,
    "format": "JSON; JSON; YAML; XML; CSV; a Markdown table; an HTML table; an HTML list",
    "category": """
        fruits; musical instruments; European rivers; programming languages; board games; kitchen tools;
        sports; insects; famous scientists; types of clouds; metals; dances; trees; inventions; breakfast
        dishes; card games; Greek gods; vegetables; endangered animals; mountain ranges; spices;
        professions; novels of the 19th century; parts of a car; desert animals; hobbies for the winter;
        questions for a job interview; icebreaker games; healthy snacks; ways to save energy
    """,
    "figure": """
        Marie Curie; Leonardo da Vinci; Isaac Newton; Cleopatra; Albert Einstein; Nelson Mandela; Ada
        Lovelace; Mozart; Frida Kahlo; Charles Darwin; William Shakespeare; Galileo Galilei; Mahatma Gandhi;
        Nikola Tesla; Jane Austen; Julius Caesar; Vincent van Gogh; Florence Nightingale; Confucius; Amelia
        Earhart; Beethoven; Rosa Parks; Aristotle; Alan Turing; Joan of Arc
    """,
    "event": """
        the fall of the Berlin Wall; the Moon landing; the French Revolution; the invention of printing; the
        First World War; the Great Depression; the building of the pyramids; the discovery of penicillin;
        the Black Death; the American Civil War; the sinking of the Titanic; the gold rush; the Olympic
        Games of antiquity; the fall of Rome; the first flight; the Silk Road; the Viking voyages; women's
        suffrage; the eruption of Vesuvius; the Space Race
    """,
    "goods": """
        apples; pencils; bottles of juice; sandwiches; stickers; tickets; books; flowers; marbles; cupcakes;
        boxes of tea; eggs; T-shirts; bricks; oranges; candles; toy cars; postcards; chairs; balloons
    """,
    "situation": """
        I have an exam tomorrow and cannot concentrate; my neighbour plays loud music every night; I want to
        change my career at forty; my best friend does not answer my messages; I have 500 dollars and want
        to invest them; my cat does not eat; I am new in town and know nobody; my computer is very slow; I
        always forget names; my son does not want to read; I feel tired all day; I lost my keys; my boss
        ignores my ideas; I cannot decide between two job offers; my plants keep dying; I spend too much
        time on my phone; I am nervous before a first date; my flight was cancelled; I want to eat less
        sugar; I burnt the dinner and guests arrive in an hour; I have never cooked before; my back hurts
        after work; my roommate never cleans the kitchen; I have to give a speech at a wedding; I want to
        learn an instrument but have little time; my phone fell into water; I argued with my brother; I am
        bored on a rainy Sunday; my tomatoes have yellow leaves; I cannot afford a holiday; my colleague
        takes the credit for my work; I want to run five kilometres by summer; I have a cold and a meeting;
        I moved into an empty flat; my dog is afraid of fireworks; I want to read the classics; I bought the
        wrong size; my daughter wants a pet
    """,
    "said": """
        Where is the nearest train station?; I would like a table for two, please.; The weather is beautiful
        today.; How much does this cost?; My sister lives in a small house near the river.; We will arrive
        tomorrow evening.; Can you help me?; The book is on the table.; I have been waiting for an hour.;
        Good morning, how are you?; She likes to read in the garden.; The children are playing in the park.;
        What time does the shop open?; I lost my passport.; Happy birthday to you!
    """,
    "tongue": "French; Spanish; German; Italian; Portuguese; English",
    "wrong": """
        She don't like coffee and he neither.; Me and my friend was going to the cinema when it start to
        rain.; He have two brother and one sister.; I am live here since five years.; Yesterday I eat a
        apple and drinked some milk.; Their going to there house over they're.; The informations you gave me
        was very usefull.; If I would have known, I would of come.; The childs is playing in the garden with
        there dog.; We was happy because we winned the game.; She speak english very good.; He goed to
        school by feet.; Its a beautiful day and the sun are shining.; I look forward to meet you next week.
    """,
    "style": "formal; friendly; funny; persuasive; simple; poetic; short; polite; dramatic; professional",
    "role": """
        a travel agent; a fitness coach; a museum guide; an interviewer; a chess teacher; a nutritionist; a
        customer service agent; a poet; a historian; a career adviser; a storyteller; a science teacher; a
        debate opponent; a film critic; a therapist
    """,
    "text": """
        an advertisement; a speech; a blog post; a product description; a thank-you note; a toast; a news
        article; a tweet; a slogan; a review; an essay; a diary page; a paragraph; a haiku; a poem; a song;
        a riddle; a joke; a motivational quote; a story
    """,
    "word": """
        garden; bridge; market; lantern; winter; harbour; memory; kitchen; river; festival; island; mirror;
        engine; village; library; silver; journey; orchard; music; copper; stadium; forest; weather; ticket;
        castle; pepper; hospital; thunder; pencil; desert; puzzle; railway; velvet; museum; honey; compass
    """,
    "ending": """
        Keep it short.; Use simple words.; Give an example.; Explain your reasoning.; Answer in three
        sentences.; Be detailed.; Use bullet points.; Thank you!; Please write at least two paragraphs.;
        Make it easy to understand.; Start with the most important point.
    """,
}

WORDS = {name: tuple(" ".join(entry.split()) for entry in text.split(";")) for name, text in _TEXTS.items()}
_WHOLE = re.compile(r" [a-z]{5,}")


def own_words(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The words that are single tokens of the target: whatever it can talk about is likely to be among them, and so are
    some beginnings of words. None where a token does not show that it follows a space.
    """
    texts = (tokenizer.token_text(id) for id in range(len(tokenizer)))
    return tuple(text[1:] for text in texts if _WHOLE.fullmatch(text))

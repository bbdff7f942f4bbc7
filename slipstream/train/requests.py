"""Whole requests, such as people make: patterns, whose slots are filled with words.

A small model left to itself writes few requests that a person would; and what a drafter has not read about, it drafts
badly. So most first turns are made here, and the target only answers them.

In a pattern `{animal}` is an entry of that list in `words.py`, `{animal2}` another one, `{word}` one of the target's
own words, `{3-20}` a number, and `{Write|Create}` one of these. A slot whose name is that of other patterns
(`{passage}`) is filled with one of them. `<<` and `>>` are braces of a program.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from slipstream.train.words import WORDS

PATTERNS: dict[str, tuple[str, ...]] = {
    "code": (
        "{Write|Create|Show me} a {language} function that {function}.",
        "How can I write a {language} function that {function}?",
        "Write a {language} {program|class} for {program}.",
        "{Implement|Write} {program} in {language}{| and explain how it works| with comments| with a short test}.",
        "Write an SQL query that {query}.",
        "Write a {language} function that {function}, and another one that {function2}.",
        "Write unit tests for a {language} function that {function}.",
        "Write a regular expression that matches {a date|a telephone number|a URL|a postal code|a "
        "hexadecimal colour|an IP address}.",
        "Write a {language} function that takes {a list of|two|the name of a} {word} and returns {the|a new} {word2}.",
        "Write a {language} class {word} with {two|three} methods{| for {word2}}.",
    ),
    "code given": (
        "{Explain|Refactor|Add comments to|Find the bug in|Write tests for|Shorten} this code:\n\n{snippet}",
        "What does this do?\n\n{snippet}",
        "Rewrite this in {language}:\n\n{snippet}",
    ),
    "arithmetic": (
        "{name} has {30-90} {goods} and gives {2-3} to each of {4-9} friends. How many are left?",
        "{goods} cost {2-9} dollars each. How much do {3-12} of them cost, if the whole price is reduced by "
        "{10-40} percent?",
        "{name} drives {40-110} kilometres an hour for {2-7} hours. How far does {name} get?{| Show each step.}",
        "A box holds {4-24} {goods}. How many boxes are needed for {50-400} {goods}?",
        "{name} is {5-14} years old, and {name2} is {2-4} times as old. How old will {name2} be in {3-20} years?",
        "A circle has a {radius|diameter} of {2-40} centimetres. {What is its area?|How long is the line around it?}",
        "{Calculate|Compute|Solve step by step:} {12-99} * {3-25} {+|-} {10-400}.",
        "Solve for x: {2-12}x {+|-} {3-40} = {41-120}.",
        "What is {5-95} percent of {40-900}?{| Explain how you got it.}",
        "{name} earns {10-35} dollars an hour and works {4-9} hours a day, {3-6} days a week. How much is "
        "that in {2-8} weeks?",
        "A recipe for {2-4} people needs {100-600} grams of flour. How much is needed for {5-12} people?",
        "List the {multiples of {3-19}|square numbers} from {1-9} to {60-150}.",
        "In a class of {18-35} students {20-80} percent have a pet. About how many is that?",
        "What is the average of {1-40}, {1-60}, {1-80} and {1-99}?",
        "{name} buys {2-9} {goods} for {2-8} dollars each and pays with a 100 dollar note. What is the change?",
    ),
    "structured": (
        "{Write|Give me|Generate} {entity} as {format} with {{5-7}|four|three} fields.",
        "{Write|Create} {format} that describes {entity}{| with realistic values| and a nested object}.",
        "List {3-8} {category} as {format}{| with a short description of each}.",
        "Make a table with {3-6} rows that compares {category} by {two|three} properties.",
        "Extract {all names and places|the people and dates|the main facts} from this text as {format}: {passage}",
        "Turn these notes into {format}: {records}",
        "Write {an HTML page about|an HTML form for|the CSS and HTML of a card that shows} {entity}.",
        "Write a YAML configuration for {a database|a mail server|a build pipeline|a game|a printer|a backup job}.",
        "{Write|Give me} {format} about {word} and {word2}.",
        "List {3-9} things that have to do with {word} as {format}.",
    ),
    "text given": (
        "{Summarize|Shorten|Rephrase|Simplify} this text: {passage}",
        "Rewrite the following in a {style} style:\n\n{passage}",
        "{Put this text into the future tense|Turn this into a dialogue|Write a headline for this|Find "
        "three keywords for this}: {passage}",
        "{Summarize the following paragraph in one sentence:|What is the main point of this text?|List the facts:}"
        "\n\n{passage}",
        "Answer from the text: {who|what} is it about?\n\n{passage}",
        "{Correct the mistakes|Fix the grammar|Proofread this}: {wrong}{| {wrong2}}",
        "Make this message more {style}: {message}",
        "Replace {name} by {name2} in this text: {name} likes {activity}. {name} also knows how to {task}.",
        "Translate into {tongue}: {said}{| {said2}}",
        "Continue this story: {opening}",
        "Classify this review as positive or negative{| and say why}: {review}",
        "Use {word}, {word2} and {thing} in {one sentence|three sentences|a short text}.",
        "Give {synonyms|opposites|rhymes} of {word} and {word2}, with an example each.",
    ),
    "explanation": (
        "{Explain|Describe} {concept}{| to {audience}| in simple words| with an example}.",
        "What is {concept}{, and why does it matter|}?",
        "How does {device} work?",
        "How would you explain {device} to {audience}?",
        "Why {is it that|do people say that} {why}?",
        "{Explain why {why}.|Can you tell me why {why}?|Do you know why {why}?}",
        "What is the difference between {pair}?",
        "What are the {pros and cons|benefits|risks|problems} of {option}?",
        "{Who was|What is known about|What did people learn from} {figure}?",
        "{What happened during|What were the causes of|Why is it important to know about} {event}?",
        "Tell me {three|five|some} {interesting |}facts about {animal}.",
        "How does {animal} {survive the winter|find its food|protect itself|raise its young}?",
        "What {is the capital of|is typical food in|should I know before I travel to} {country}?",
        "Describe the {climate|history|music} of {country}.",
        "Compare {country} and {country2}.",
        "What do you think of {option}? Give reasons.",
        "What is {word}{| and what is {word2}}?",
        "Explain {word}{| to {audience}}.",
        "What does {word} mean{| in {concept}|, and where does the word come from}?",
        "Why is {word} {important|difficult|interesting} for {audience}?",
        "What is the difference between {word} and {word2}?",
        "Tell me {something|everything you know|three facts} about {word}{| and {word2}}.",
        "How {does {word} influence|is {word} connected with} {word2}?",
        "What role does {word} play in {concept}?",
    ),
    "advice": (
        "How {do|can} I {task}?{| Give me step by step instructions.}",
        "Give me {three|four|seven|ten} tips for {activity}.",
        "What should {a beginner|I|my friend} know about {activity}?",
        "{situation}. What {should|can} I do?",
        "Suggest {three|five|ten} {category}.",
        "Make a {plan|checklist|timetable} for {activity}.",
        "Write a recipe for {food}{| for {2-8} people| without milk|, with exact amounts}.",
        "What can I cook with {food} that is left over?",
        "Plan {a weekend|three days|a week} in {city}{| with two children| for little money}.",
        "What is the best way to {task}?",
        "What are common mistakes in {activity}?",
        "Which books or websites help with {activity}?",
        "What should I know about {word}?",
        "Give me {three|five|ten} {tips|ideas|questions} about {word}{| and {word2}}.",
        "How can {word} help me with {activity}?",
        "I want to learn more about {word}. Where should I start?",
        "How do I explain {word} to {recipient}?",
    ),
    "letter": (
        "Write {an email|a letter|a short message} to {recipient} about {matter}.",
        "Help me write {an email|a letter} in which I {apologize for|ask about|complain about} {matter}.",
        "Write a cover letter for a job as {job}.",
        "Write {three|five} questions for an interview with {job}{| and good answers}.",
        "Answer this message {politely|briefly}: {message}",
        "Write {text} about {option}.",
        "Write {text} for {entity}.",
        "Write {text} about {word}{| and {word2}}.",
        "Write an email to {recipient} about {word}.",
    ),
    "story": (
        "{Write|Tell me|Make up} a {short |funny |sad |}story about {creature} who {deed}.",
        "Write {text} about {thing}.",
        "Write a story in which {creature} meets {creature2}.",
        "Write a dialogue between {creature} and {creature2}{| about {thing}}.",
        "Write a {poem|song|ballad} about {creature}.",
        "Describe {thing}{| in one paragraph| so that one can smell and hear it}.",
        "Write the {first|last} page of a novel about {creature}.",
        "Write a letter from {creature} to {creature2}.",
        "Write a bedtime story with {animal} and {animal2}.",
        "Tell a legend that explains why {why}.",
        "Write a scene in {city} in which {creature} {deed}.",
        "{Write|Tell me} a story about {word}{| and {word2}}.",
        "Write a {poem|song|fairy tale} about {word}{| and {word2}}.",
        "Write a story about {creature} with the words {word} and {word2}.",
    ),
    "role": (
        "{situation}. You are {role}: what do you say?",
        "Act as {role} and talk with me about {activity}.",
        "Imagine that you are {figure}. {What do you think of {device}?|Describe a day of your "
        "life.|Introduce yourself.}",
        "Let us play a game: you are {creature}, and I ask you about {thing}. Begin.",
        "Write a conversation between {figure} and {figure2} about {concept}.",
        "You are {role}. Tell me about {word}.",
        "Debate {word}: give both sides an argument.",
    ),
}

# What stands in the slots of the patterns above beside words.
_PARTS: dict[str, tuple[str, ...]] = {
    "passage": ("{sentence} {sentence} {sentence}", "{sentence} {sentence} {sentence} {sentence} {sentence}"),
    "sentence": (
        "{person} was born in {city} in {1931-2004} and works as {job}.",
        "On {2-28} {March|June|October|December} {1990-2024} {person} moved from {city} to {city2}.",
        "The {museum|bakery|workshop|school|theatre} in {city} was founded in {1850-2010} and has {4-90} employees.",
        "{person} teaches {activity} and has written {2-12} books about it.",
        "Many people in {country} worry about {option}.",
        "Last year {person} learned to {task}.",
        "The trip takes {2-9} hours and costs {20-300} dollars.",
        "Scientists from {city} have found out why {why}.",
        "It has rained for {2-9} days, and the {market|match|concert|parade} was cancelled.",
        "{name} sold {20-900} {goods} and gave the money to a hospital.",
        "The old town hall is being repaired, so the office opens at {7-11} o'clock.",
        "{person} and {person2} started a company that makes {goods}.",
        "In the evening the family eats {food}, and then they talk about {activity}.",
        "Visitors can see {2-9} paintings, {10-80} letters and {thing}.",
    ),
    "records": (
        "{person}, {18-80}, {city}; {person2}, {18-80}, {city2}",
        "{goods}, {1-20} dollars; {goods2}, {1-20} dollars",
        "{city}: {10-35} degrees, sunny; {city2}: {1-25} degrees, rain",
    ),
    "message": (
        "Hi, I got your note about {matter}, but I have no time before Friday.",
        "Hello, what about {matter}? I need an answer today.",
        "Sorry, I was busy with {activity} and forgot {matter}.",
        "Thanks for your help with {matter}. Can we talk about it in {city}?",
    ),
    "review": (
        "We ordered {food}, but it was cold, and the waiter forgot our drinks.",
        "I bought {device} and it works perfectly, even after {2-12} months.",
        "The film about {creature} was too long, but the music was wonderful.",
        "Best hotel in {city}: clean, quiet and close to the station.",
    ),
    "opening": (
        "When {name} opened the box, there was nothing in it but {thing}.",
        "It was the third night without sleep for {creature}.",
        "Nobody in {city} had ever seen {creature}.",
        '"You should not have come," said {name}.',
    ),
    "snippet": (
        "def {check|test|find|locate}_{word}(items, x):\n    for i in range(len(items)):\n        if items[i] == x:\n"
        "            return i\n    return -1",
        "def total_{word}(prices, tax=0.{1-2}):\n    result = 0\n    for p in prices:\n        result += p * (1 + "
        "tax)\n    return result",
        "{word} = [{1-9}, {1-9}, {10-99}]\nfor n in {word}:\n    if n % 2:\n        print(n, 'odd')\n    "
        "else:\n        print(n, 'even')",
        "function greet(name) <<\n  if (!name) return 'Hello!';\n  return 'Hello, ' + name + '!';\n>>",
        "class Account:\n    def __init__(self, owner, {word}=0):\n        self.owner = owner\n"
        "        self.{word} = {word}\n\n"
        "    def withdraw(self, amount):\n        self.{word} -= amount\n        return self.{word}",
        "def {word}(base, n):\n    if n == 0:\n        return 1\n    return base * {word}(base, n - 1)",
        "SELECT {word}, COUNT(*) FROM {word2} WHERE age > {18-60} GROUP BY {word};",
        "with open('{word}.txt') as f:\n    lines = f.readlines()\nprint(len(lines))\nprint(max(lines, key=len))",
        "int largest(int a[], int n) <<\n    int best = 0;\n    for (int i = 0; i <= n; i++)\n        if "
        "(a[i] > best) best = a[i];\n"
        "    return best;\n>>",
        "def is_prime(n):\n    for i in range(2, n):\n        if n % i == 0:\n            return False\n    "
        "return True",
        "let words = text.split(' ');\nlet longest = '';\nfor (const w of words) <<\n  if (w.length > "
        "longest.length) longest = w;\n>>",
        "def clean_{word}(text):\n    return ' '.join(text.lower().strip().split())",
    ),
}

# What some people say before they ask.
_LEADS = (
    *("I am {job}.", "I am {12-80} years old.", "I live in {city}.", "My name is {name}.", "I am from {country}."),
    *("Hi!", "Hello, I need help.", "Quick question.", "I am interested in {word}.", "I am writing about {word}."),
    *(
        "I am preparing a lesson about {concept}.",
        "I have a friend who likes {activity}.",
        "I read about {event} today.",
    ),
    *("I work with {word} and {word2}.", "I know nothing about {word}.", "We talked about {word} in class."),
)

KINDS = tuple(PATTERNS)  # a request's kind is kept as its place in here
_EVERY = tuple((kind, pattern) for kind, name in enumerate(KINDS) for pattern in PATTERNS[name])
_ENOUGH = 100  # words of a target's own; with fewer a list of ours is taken
_LED, _ENDED = 0.25, 0.3  # of the requests have something before them; say how they want to be answered
_SLOT = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)-(\d+)")


class Requests:
    """Makes requests. `own`: words of the target's own, for `{word}`, if they are more than a few."""

    def __init__(self, own: Sequence[str]) -> None:
        self._words = {**WORDS, "word": own} if len(own) >= _ENOUGH else WORDS

    def make(self, draw: random.Random) -> tuple[int, str]:
        """The place of a kind in `KINDS`, and a request of that kind; every pattern is equally likely."""
        kind, pattern = draw.choice(_EVERY)
        text = self._filled(pattern, draw).replace("<<", "{").replace(">>", "}")
        text = text[0].upper() + text[1:]
        if draw.random() < _LED:
            text = f"{self._filled(draw.choice(_LEADS), draw)} {text}"
        if draw.random() < _ENDED:
            given = pattern.endswith("}")  # a text, which an ending is no part of
            text += ("\n\n" if given else " ") + draw.choice(self._words["ending"])
        return kind, text

    def _filled(self, pattern: str, draw: random.Random) -> str:
        """A pattern with a choice for every slot, from the inside out. A name that comes again stands for the same, and
        no part comes twice.
        """
        taken: dict[str, str] = {}
        while found := _SLOT.search(pattern):
            pattern = pattern[: found.start()] + self._choice(found[1], taken, draw) + pattern[found.end() :]
        return pattern

    def _choice(self, slot: str, taken: dict[str, str], draw: random.Random) -> str:
        if "|" in slot:
            return draw.choice(slot.split("|"))
        if span := _RANGE.fullmatch(slot):
            return str(draw.randint(int(span[1]), int(span[2])))
        if slot in _PARTS:
            part = draw.choice([part for part in _PARTS[slot] if part not in taken])
            taken[part] = slot
            return self._filled(part, draw)
        while slot not in taken:
            word = draw.choice(self._words[slot.removesuffix("2")])
            if word not in taken.values():
                taken[slot] = word
        return taken[slot]

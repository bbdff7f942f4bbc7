"""How user turns begin: a few words that set the kind of the request; the target writes the rest.

An opening is built from parts, one of each slot of its kind. A model alone asks about the same few things; a word like
"SELECT" or "A farmer" takes it elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

Slots = tuple[tuple[str, ...], ...]

_TEXTS = ("this paragraph:", "the following text:", "this email:", "these notes:", "the article below:")

KINDS: dict[str, Slots] = {
    "free": (("",),),  # the target's own choice
    "code": (
        ("Write", "Implement", "I need", "Show me", "Create"),
        ("a Python function", "a JavaScript class", "an SQL query", "a Bash script", "a C program", "a Rust function",
         "a unit test", "a regular expression"),
        ("that", "to", "for"),
    ),
    "fix": (
        ("Fix", "What is wrong with", "Explain", "Refactor", "Add comments to", "Find the bug in"),
        ("this code:", "my function:", "the following program:"),
        ("\n\n```python\ndef", "\n\n```python\nclass", "\n\n```javascript\nfunction", "\n\n```sql\nSELECT",
         "\n\n```c\nint", "\n\n```html\n<div"),
    ),
    "arithmetic": (
        ("Maria", "Tom", "A farmer", "A train", "A shop", "A baker", "A class of students", "Two friends"),
        ("has", "needs", "sold", "spends", "travels", "started with"),
    ),
    "reckoning": (
        ("Calculate", "Solve", "Work out, step by step,", "What is the value of"),
        ("the area of", "the sum of", "the equation", "the average of", "x in", "the probability of"),
    ),
    "extraction": (
        ("Extract", "List", "Pull out", "Return"),
        ("the names and dates in", "all prices in", "every person and place in", "the main facts of"),
        _TEXTS,
        ("", "\n\n"),
    ),
    "structure": (
        ("Generate", "Give me", "Write", "Produce"),
        ("a JSON object", "a CSV table", "a YAML file", "a Markdown table", "an XML document"),
        ("describing", "of", "with"),
    ),
    "rewrite": (
        ("Rewrite", "Shorten", "Correct the grammar of", "Make more formal", "Paraphrase", "Simplify", "Proofread"),
        _TEXTS,
        ("", "\n\n", '\n\n"'),
    ),
    "summary": (
        ("Summarise", "Give a one-sentence summary of", "Write a headline for", "List the key points of"),
        _TEXTS,
        ("", "\n\n"),
    ),
    "list": (
        ("List", "Name", "Give me", "Suggest"),
        ("three", "five", "ten", "some", "the best"),
        ("ways to", "reasons why", "examples of", "ideas for", "books about", "names for"),
    ),
    "letter": (
        ("Write", "Draft", "Help me write"),
        ("an email", "a letter", "a message", "a cover letter", "an apology", "an invitation"),
        ("to my", "asking", "about", "for"),
    ),
    "story": (
        ("Write", "Tell me", "Make up"),
        ("a short story", "a poem", "a fairy tale", "a dialogue", "the opening scene of a play", "a song"),
        ("about", "in which", "set in"),
    ),
    "translation": (
        ("Translate", "How do you say", "Put"),
        ("this sentence", "the following", "these words", "my question"),
        ("into French:", "into Spanish:", "into German:", "into English:"),
    ),
    "fact": (
        ("What", "Who", "When", "Where", "Why", "How", "Which", "Is it true that", "How many"),
        ("is", "are", "did", "does", "was", "can"),
    ),
    "explanation": (
        ("Explain", "Describe", "Teach me", "Can you tell me"),
        ("how", "why", "what", "the difference between", "in simple terms", "the history of"),
    ),
    "advice": (
        ("I want to", "I am trying to", "Help me", "My friend wants to", "Should I", "How can I"),
        ("learn", "plan", "decide", "improve", "save", "cook", "build", "find"),
    ),
    "role": (
        ("You are", "Act as", "Pretend to be", "Answer as if you were"),
        ("a pirate", "a doctor", "a museum guide", "a strict teacher", "a detective", "a travel agent", "a chef",
         "an old sailor"),
        ("", "and", "who"),
    ),
    "comparison": (
        ("Compare", "Which is better,", "What are the pros and cons of", "Classify"),
        ("the following", "two", "a", "these"),
    ),
    "steps": (
        ("Give me instructions", "Write a recipe", "Make a plan", "Write a schedule", "Create a checklist"),
        ("for", "to", "that"),
    ),
}  # fmt: skip

NAMES = tuple(KINDS)  # an opening's kind is stored as its index here

# How a user continues after an answer.
FOLLOW_UPS = (
    *("", "Now", "Thanks!", "Can you", "Could you also", "Why", "What about", "What if", "Explain", "Please"),
    *("Rewrite that", "Shorten", "Translate", "Give me an example", "Add", "Change", "How", "And"),
    *("Is there", "Write the same", "In your answer", "List", "Which", "I don't understand"),
)


# Requests about a given text.
REQUESTS = (
    *("Summarise the following text:", "Give a one-sentence summary of this text:", "Write a headline for this text:"),
    *("List the key points of the text below:", "What is the main idea of this text?", "Shorten this text:"),
    *(
        "Rewrite this text in simple words:",
        "Make this text more formal:",
        "Turn this text into a list of bullet points:",
    ),
    *(
        "Correct the grammar and spelling of this text:",
        "Repeat this text word for word:",
        "Add a conclusion to this text:",
    ),
    *("Put this text into the past tense:", "Translate this text into French:", "Translate this text into Spanish:"),
    *("Extract all names and numbers in this text as JSON:", "Who and what is mentioned in the following text?"),
    *(
        "Write three questions that this text answers, and the answers:",
        "Answer in the style of this text: who are you?",
    ),
)
_BEHIND = 0.25  # share of requests that come after their text


def opening(draw: random.Random) -> tuple[int, str]:
    """The index of a kind in `NAMES`, and an opening of that kind; every kind is equally likely."""
    kind = draw.randrange(len(NAMES))
    return kind, joined(draw.choice(slot) for slot in KINDS[NAMES[kind]])


def follow_up(draw: random.Random) -> str:
    """The first words of another turn."""
    return draw.choice(FOLLOW_UPS)


def request(draw: random.Random, text: str) -> str:
    """A question about a text, with the text."""
    wanted = draw.choice(REQUESTS)
    parts = (text, wanted) if draw.random() < _BEHIND else (wanted, text)
    return "\n\n".join(parts)


def joined(parts: Iterable[str]) -> str:
    """One part of each slot, joined to a text."""
    return " ".join(part for part in parts if part).replace(" \n", "\n")

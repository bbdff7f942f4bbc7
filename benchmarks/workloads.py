"""Prompts by the kind of repetition in their answers: copying, summarising, and neither."""

from __future__ import annotations

_CODE = """def total_price(items, tax_rate):
    total = 0
    for item in items:
        price = item["price"] * item["quantity"]
        total = total + price
    total = total + total * tax_rate
    return total


def print_receipt(items, tax_rate):
    for item in items:
        print(item["name"], item["quantity"], item["price"])
    print("Total:", total_price(items, tax_rate))"""

_LETTER = """Dear Mr. Harrison,

I am writing to you about the order that I placed on the 3rd of March. The package arrived on the 12th of March, but two
of the five items were missing: the blue ceramic teapot and the set of six silver spoons. I would like to recieve the
missing items as soon as posible, or to get my money back. I have attached a copy of the invoice to this letter.

Yours sincerely,
Margaret Lindqvist"""

_RECORDS = """name: Alice Johnson; age: 34; city: Boston; job: nurse
name: Bob Martinez; age: 51; city: Denver; job: electrician
name: Carla Nguyen; age: 27; city: Seattle; job: designer
name: David Okafor; age: 45; city: Houston; job: teacher"""

_ARTICLE = """The Great Barrier Reef is the largest coral reef system in the world. It is made up of more than 2,900
individual reefs and 900 islands, and it stretches for over 2,300 kilometres along the coast of Queensland, Australia.
The reef can be seen from outer space and is the largest structure made by living organisms. It supports a wide
diversity of life and was selected as a World Heritage Site in 1981. A large part of the reef is protected by the Great
Barrier Reef Marine Park, which helps to limit the impact of human use, such as fishing and tourism. Other threats to
the reef include runoff, climate change with mass coral bleaching, and outbreaks of the crown-of-thorns starfish."""

_MEETING = """Minutes of the meeting on Monday. Present: Ann, Raj, Tom and Lucy. Ann opened the meeting and said
that the release of version 2 is planned for the 15th of May. Raj reported that the login page is finished and that the
payment page needs one more week. Tom said that the tests of the payment page fail on older phones and that he will fix
them by Thursday. Lucy showed the new design of the start page; all agreed that it should be used. Ann asked Lucy to
send the design to the translators. The next meeting is on Monday at 10 o'clock."""

EDIT = [
    f"Copy this code exactly, but rename total_price to compute_total:\n\n{_CODE}",
    f"Correct the spelling of this letter and change nothing else:\n\n{_LETTER}",
    f"Repeat these records, one per line, exactly as they are:\n\n{_RECORDS}",
    f"Repeat the following text word for word:\n\n{_ARTICLE}",
]
SUMMARY = [
    f"Summarize the following text in a few sentences, using its own words:\n\n{_ARTICLE}",
    f"Summarize these minutes and list who does what, using the words of the minutes:\n\n{_MEETING}",
    f"Turn these records into sentences, one for each person:\n\n{_RECORDS}",
    f"Explain what this code does, function by function, quoting it:\n\n{_CODE}",
]
STORY = [
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Tell me a bedtime story about a small dragon who is afraid of fire.",
    "Write the beginning of a mystery set on a night train through the mountains.",
    "Describe a market in an imaginary city under the sea.",
]
KINDS = {"edit/copy": EDIT, "summary": SUMMARY, "story": STORY}

"""Six short prompts of six kinds, from much to copy to nothing to copy. Written for a small chat model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DemoPrompt:
    """A kind of work and one example of it."""

    kind: str
    text: str


PROMPTS = (
    DemoPrompt(
        "code",
        """Add a docstring to every method of this Python class and print the whole class again.

class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        return self.balance""",
    ),
    DemoPrompt(
        "json",
        """Turn this list of orders into a JSON array. Each object has the keys "id", "customer", "item" and "price".

Order 1041: Maria Lindqvist bought a walnut writing desk for 349.00.
Order 1042: Tomasz Kowalczyk bought a walnut bookshelf for 219.50.
Order 1043: Maria Lindqvist bought a brass desk lamp for 64.90.
Order 1044: Adaeze Okafor bought a brass floor lamp for 128.00.""",
    ),
    DemoPrompt(
        "rewriting",
        """Rewrite this letter with the name "Mr. Bennet" changed to "Dr. Alvarez" and keep everything else as it is.

Dear Mr. Bennet,

Thank you for visiting our laboratory last Tuesday. The instruments that you asked about will be delivered to your
office before the end of the month. Please let us know, Mr. Bennet, whether the second floor entrance is open on
weekends, because the delivery company prefers to come on a Saturday morning.

Kind regards,
Eleanor Whitfield""",
    ),
    DemoPrompt("chat", "What are three good ways to fall asleep faster? Answer with a short list."),
    DemoPrompt("story", "Write a short story about a lighthouse keeper who finds a message in a bottle."),
    DemoPrompt(
        "arithmetic",
        "Write the multiplication table of 7 from 7 x 1 to 7 x 12, one line for each product, as in: 7 x 1 = 7",
    ),
)

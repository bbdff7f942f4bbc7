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
        """Extract the data from this message as a JSON object with the keys "name", "email", "phone", "order_number", \
"product" and "address".

Hello, my name is Eleanor Whitfield and I ordered a walnut writing desk on March 3rd. The order number is 20417-B. \
It should have been delivered to 58 Harbour Street, Bristol, but nothing has arrived yet. Please call me at \
0117 496 0284 or write to eleanor.whitfield@example.com.""",
    ),
    DemoPrompt(
        "rewriting",
        """Correct the spelling mistakes in this text:

Thank you for visiting our labratory last Tuesday. The instruments that you asked about will be deliverd to your \
office before the end of the month. Please let us know whether the second floor entrance is open on weekends, because \
the delivery company prefers to come on a Saterday morning.""",
    ),
    DemoPrompt("chat", "Why is the sky blue?"),
    DemoPrompt("story", "Write a short story about a lighthouse keeper who finds a message in a bottle."),
    DemoPrompt("arithmetic", "Calculate step by step: 12 + 7, 19 + 7, 26 + 7, 33 + 7, 40 + 7."),
)

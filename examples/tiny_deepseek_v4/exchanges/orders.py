"""Order-taking dialogues: the order is kept, changed and added up."""

from random import Random

from exchanges.base import Draft, Exchange, Family, wording
from exchanges.words import DRINKS


def state(order: dict[str, int]) -> str:
    """Return the items of an order with their numbers."""
    return ", ".join(f"{number} {item}" for item, number in order.items())


def repeated(order: dict[str, int]) -> str:
    """Return the waiter's reply before the order is complete."""
    return f"You have {state(order)}. Anything else?"


def bill(order: dict[str, int], prices: dict[str, int]) -> str:
    """Return the last reply: one line per item, then the sum of two, and the total."""
    costs = {item: number * prices[item] for item, number in order.items()}
    lines = [f"{n} {item}: {n}*{prices[item]}={costs[item]}" for item, n in order.items()]
    total = sum(costs.values())
    if len(costs) > 1:
        lines.append(f"{'+'.join(map(str, costs.values()))}={total}")
    return "\n".join([*lines, f"Total: {total} dollars. Thank you!"])


def change(rng: Random, order: dict[str, int], menu: list[str]) -> str:
    """Change the order in place and return the customer's words."""
    absent = [item for item in menu if item not in order and len(order) < 2]
    kinds = ["number"] + ["add"] * 2 * bool(absent) + ["remove"] * (len(order) > 1)
    kind = rng.choice(kinds)
    number = rng.randint(1, 4)
    if kind == "add":
        item = rng.choice(absent)
        order[item] = number
        return wording(rng, "add to an order", number=number, item=item)
    item = rng.choice(list(order))
    if kind == "remove":
        del order[item]
        return rng.choice((f"No {item} after all.", f"Take off the {item}.", f"Cancel the {item}."))
    number += number >= order[item]  # always another number
    order[item] = number
    return rng.choice((f"Make it {number} {item}.", f"I want {number} {item} instead."))


def order_dialogue(rng: Random) -> Draft:
    menu = rng.sample(DRINKS, 3)
    prices = {item: rng.randint(2, 6) for item in menu}
    order = {item: rng.randint(1, 4) for item in rng.sample(menu, rng.randint(1, 2))}
    wish = " and ".join(f"{number} {item}" for item, number in order.items())
    price_list = ", ".join(f"{item} {price}" for item, price in prices.items())
    turns = [f"Menu: {price_list}.\n{wording(rng, 'order', wish=wish)}"]
    pays = rng.random() < 0.5
    if rng.randint(0, 1):
        turns += [repeated(order), change(rng, order, menu)]
    key = f"{price_list} {wish} {state(order)} {len(turns)}"
    turns.append(repeated(order))
    if not pays:
        return Draft(f"state {key}", tuple(turns), state(order))
    turns.append(rng.choice(("No, that is all.", "That is all, thanks.", "What does it cost?")))
    total = sum(number * prices[item] for item, number in order.items())
    return Draft(f"bill {key}", (*turns, bill(order, prices)), f"{total} dollars")


def read_order(reply: str, exchange: Exchange) -> str | None:
    """Return the total of a bill, or the items of a repeated order in any order."""
    if exchange.answer.endswith("dollars"):
        _, marker, tail = reply.rpartition("Total:")
        return tail.split(".")[0].strip() if marker else None
    _, marker, tail = reply.rpartition("You have ")
    items = [item.strip() for item in tail.split(".")[0].split(",")]
    right = exchange.answer.split(", ")
    return exchange.answer if marker and sorted(items) == sorted(right) else ", ".join(items)


FAMILIES = (Family("order", order_dialogue, read_order),)

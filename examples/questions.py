"""Tenant globex: a question becomes SQL for one small schema that the adapter knows by heart.

v1 writes the question's values into the statement. v2 follows one rule more, against injection: the
values stay outside as bound parameters, listed in a trailing comment.
"""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

from tasks import Example, LoRAShape, Task, draw_held_out, draw_train

TRAIN_COUNT = 1200
HELD_OUT_COUNT = 96
SHAPE = LoRAShape(rank=4, alpha=8, target_modules=("v_proj", "down_proj"))

SCHEMA = """\
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT, plan TEXT);
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT, category TEXT, price REAL, stock INTEGER);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customers(id),
  total REAL, status TEXT, placed_on TEXT);
"""

Value = str | int


@dataclass(frozen=True, slots=True)
class Family:
    """Questions that differ in wording and values and have the same statement.

    `{city}` and the like in a question name its values; `sql` has them as `:city`.
    """

    sql: str
    train: tuple[str, ...]
    held_out: tuple[str, ...]


FAMILIES = (
    Family(
        "SELECT name FROM customers WHERE city = :city",
        (
            "List the customers in {city}.",
            "Which customers live in {city}?",
            "Show me all customers from {city}.",
            "I need the names of our customers in {city}.",
            "Customers in {city}?",
            "Who lives in {city}?",
            "Give me every customer located in {city}.",
            "Name the customers that we serve in {city}.",
        ),
        (
            "Who are our customers in {city}?",
            "Which of our customers are from {city}?",
        ),
    ),
    Family(
        "SELECT COUNT(*) FROM customers WHERE city = :city",
        (
            "How many customers live in {city}?",
            "Count the customers in {city}.",
            "What is the number of customers from {city}?",
            "How many of our customers are from {city}?",
            "Tell me how many customers there are in {city}.",
            "How big is our customer base in {city}?",
            "How many people in {city} buy from us?",
        ),
        (
            "How many customers do we have in {city}?",
            "Give me the customer count for {city}.",
        ),
    ),
    Family(
        "SELECT name FROM customers WHERE plan = :plan",
        (
            "Which customers are on the {plan} plan?",
            "List all customers with the {plan} plan.",
            "Who has the {plan} plan?",
            "Show everyone on the {plan} plan.",
            "Give me the names of the {plan} plan customers.",
            "Customers with {plan} as their plan?",
            "Who pays for the {plan} plan?",
        ),
        (
            "Show me the customers on the {plan} plan.",
            "Who is on the {plan} plan?",
        ),
    ),
    Family(
        "SELECT COUNT(*) FROM customers WHERE city = :city AND plan = :plan",
        (
            "How many customers in {city} are on the {plan} plan?",
            "Count the customers from {city} with the {plan} plan.",
            "What is the number of {plan} customers in {city}?",
            "How many {plan} plan customers live in {city}?",
            "Tell me how many customers in {city} use the {plan} plan.",
        ),
        (
            "How many customers in {city} have the {plan} plan?",
            "Count everyone in {city} who is on the {plan} plan.",
        ),
    ),
    Family(
        "SELECT COUNT(*) FROM orders WHERE status = :status",
        (
            "How many orders are {status}?",
            "Count the {status} orders.",
            "What is the number of {status} orders?",
            "How many {status} orders do we have?",
            "Number of {status} orders?",
            "How many of the orders have been {status}?",
            "Are there many {status} orders? Count them.",
        ),
        (
            "Tell me how many {status} orders there are.",
            "How many orders were {status}?",
        ),
    ),
    Family(
        "SELECT SUM(total) FROM orders WHERE status = :status",
        (
            "What is the total value of {status} orders?",
            "Add up all {status} orders.",
            "What is the sum of the {status} orders?",
            "How much money is in {status} orders?",
            "Total of all {status} orders, please.",
            "How much are the {status} orders together?",
            "What are our {status} orders worth?",
        ),
        (
            "How much are all {status} orders worth?",
            "What do the {status} orders add up to?",
        ),
    ),
    Family(
        "SELECT id, total FROM orders ORDER BY total DESC LIMIT :n",
        (
            "Show the {n} largest orders.",
            "Top {n} orders by total.",
            "Which {n} orders had the highest total?",
            "List our {n} most valuable orders.",
            "Give me the top {n} orders.",
            "What are the {n} biggest orders?",
            "Show me {n} orders with the largest totals.",
            "Find the {n} most expensive orders.",
        ),
        (
            "Give me the {n} biggest orders.",
            "What are our {n} largest orders by total?",
        ),
    ),
    Family(
        "SELECT id, total FROM orders WHERE placed_on > :date",
        (
            "Which orders were placed after {date}?",
            "List the orders after {date}.",
            "Show me all orders since {date}.",
            "What orders came after {date}?",
            "Orders newer than {date}?",
            "Give me everything ordered after {date}.",
            "Which orders came in later than {date}?",
        ),
        (
            "Which orders came in after {date}?",
            "Show the orders that were placed since {date}.",
        ),
    ),
    Family(
        "SELECT id, total FROM orders WHERE status = :status AND total > :amount",
        (
            "Which {status} orders are above {amount} dollars?",
            "List {status} orders over {amount}.",
            "Show all {status} orders with a total of more than {amount}.",
            "Which {status} orders exceed {amount}?",
            "Give me the {status} orders that are worth more than {amount}.",
            "Show me the {status} orders over {amount} dollars.",
        ),
        (
            "Show me {status} orders above {amount}.",
            "Which orders are {status} and above {amount} dollars?",
        ),
    ),
    Family(
        "SELECT orders.id, orders.total FROM orders JOIN customers"
        " ON customers.id = orders.customer_id WHERE customers.name = :name",
        (
            "Show the orders of {name}.",
            "Which orders did {name} place?",
            "List everything that {name} ordered.",
            "What did {name} buy?",
            "All orders of {name}, please.",
            "Give me the orders that belong to {name}.",
            "Find every order by {name}.",
            "What has {name} ordered so far?",
        ),
        (
            "Give me all orders by {name}.",
            "What are the orders of {name}?",
        ),
    ),
    Family(
        "SELECT name, price FROM products WHERE price < :amount",
        (
            "Which products cost less than {amount}?",
            "List products cheaper than {amount} dollars.",
            "Show me products with a price below {amount}.",
            "What can I buy for less than {amount}?",
            "Products under {amount} dollars?",
            "What do we sell for less than {amount} dollars?",
            "Find all products below {amount}.",
        ),
        (
            "What products do we have for less than {amount} dollars?",
            "Which products are priced below {amount}?",
        ),
    ),
    Family(
        "SELECT name, price FROM products WHERE price > :amount",
        (
            "Which products cost more than {amount}?",
            "List products dearer than {amount} dollars.",
            "Show me products with a price above {amount}.",
            "What do we sell for more than {amount} dollars?",
            "Products over {amount} dollars?",
            "What is there for more than {amount}?",
            "Find all products above {amount}.",
        ),
        (
            "What products do we have for more than {amount} dollars?",
            "Which products are priced above {amount}?",
        ),
    ),
    Family(
        "SELECT AVG(price) FROM products WHERE category = :category",
        (
            "What is the average price of {category} products?",
            "How much does a product in {category} cost on average?",
            "Give me the mean price in the category {category}.",
            "Average price in {category}?",
            "What do {category} products cost on average?",
            "Compute the average price of the {category} category.",
            "What is the mean price of {category}?",
        ),
        (
            "What is the average price in {category}?",
            "How expensive are {category} products on average?",
        ),
    ),
    Family(
        "SELECT name FROM products WHERE category = :category AND stock = 0",
        (
            "Which {category} products are out of stock?",
            "What is sold out in {category}?",
            "List the {category} products that we have none left of.",
            "Which products in {category} have no stock?",
            "Show me sold out products in {category}.",
            "What is out of stock in {category}?",
            "Is anything in {category} sold out?",
        ),
        (
            "Which products in {category} are sold out?",
            "List everything in {category} that is out of stock.",
        ),
    ),
    Family(
        "SELECT city, COUNT(*) FROM customers GROUP BY city",
        (
            "How many customers are there per city?",
            "Count the customers in each city.",
            "Give me the number of customers by city.",
            "How many customers does each city have?",
            "Customers per city?",
            "Show the customer count for every city.",
            "Break our customers down by city.",
            "How are the customers spread over the cities?",
        ),
        (
            "How many customers do we have in each city?",
            "Give me a count of customers for each city.",
        ),
    ),
    Family(
        "SELECT status, SUM(total) FROM orders GROUP BY status",
        (
            "What is the order value per status?",
            "Add up the orders for each status.",
            "Give me the sum of order totals by status.",
            "What are the orders worth in each status?",
            "Order totals per status?",
            "Show the total of the orders for every status.",
            "Break the order value down by status.",
            "How much money is there in each order status?",
        ),
        (
            "What is the sum of the orders in each status?",
            "What is the total order value for each status?",
        ),
    ),
)

STATUSES = ("pending", "paid", "shipped", "cancelled", "returned")
PLANS = ("free", "basic", "team", "premium")
TRAIN_CITIES = (
    "Oslo",
    "Lisbon",
    "Toronto",
    "Nairobi",
    "Madrid",
    "Chicago",
    "Osaka",
    "Berlin",
    "Cairo",
    "Lima",
    "Sydney",
    "Prague",
    "Dublin",
    "Austin",
    "New York",
    "Cape Town",
    "Helsinki",
    "Mumbai",
)
HELD_OUT_CITIES = ("Vienna", "Boston", "San Diego", "Athens", "Seoul")
TRAIN_CATEGORIES = ("toys", "books", "garden", "sports", "kitchen", "office", "music", "shoes")
HELD_OUT_CATEGORIES = ("furniture", "jewelry", "games")
TRAIN_FIRST = ("Anna", "Luis", "Mei", "Omar", "Sara", "Paul", "Ines", "Ravi", "Julia", "Tom")
TRAIN_LAST = ("Berg", "Silva", "Chen", "Haddad", "Novak", "Moore", "Costa", "Patel", "Weber")
HELD_OUT_FIRST = ("Nora", "David", "Elena", "Peter")
HELD_OUT_LAST = ("Fischer", "Garcia", "Brown", "Kim")


def tasks(seed: int) -> tuple[Task, Task]:
    """`globex:v1` and `globex:v2`; the same seed gives the same examples."""
    return _task("v1", seed), _task("v2", seed)


def _task(version: str, seed: int) -> Task:
    bound = version == "v2"
    rng = random.Random(f"globex {seed}")
    train = draw_train(lambda r: _example(r, bound, held_out=False), rng, TRAIN_COUNT)
    held_out = draw_held_out(
        lambda r: _example(r, bound, held_out=True), rng, HELD_OUT_COUNT, train
    )
    return Task(
        tenant="globex",
        version=version,
        shape=SHAPE,
        train=train,
        held_out=held_out,
        instruction=_instruction(bound),
        is_valid=_runs_bound if bound else _runs,
    )


def _example(rng: random.Random, bound: bool, held_out: bool) -> Example:
    family = rng.choice(FAMILIES)
    question = rng.choice(family.held_out if held_out else family.train)
    values = _values(rng, held_out)
    return Example(
        prompt=question.format(**values), answer=_render(family.sql, values, bound=bound)
    )


def _values(rng: random.Random, held_out: bool) -> dict[str, Value]:
    first, last = (HELD_OUT_FIRST, HELD_OUT_LAST) if held_out else (TRAIN_FIRST, TRAIN_LAST)
    return {
        "city": rng.choice(HELD_OUT_CITIES if held_out else TRAIN_CITIES),
        "category": rng.choice(HELD_OUT_CATEGORIES if held_out else TRAIN_CATEGORIES),
        "name": f"{rng.choice(first)} {rng.choice(last)}",
        "plan": rng.choice(PLANS),
        "status": rng.choice(STATUSES),
        "n": rng.randint(2, 25),
        "amount": 5 * rng.randint(2, 190),
        "date": f"{rng.randint(2021, 2025)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
    }


def _render(sql: str, values: Mapping[str, Value], bound: bool) -> str:
    """The statement, its values inline or as `?` with a JSON list of them in a comment."""
    words: list[str] = []
    parameters: list[Value] = []
    for word in sql.split(" "):
        if not word.startswith(":"):
            words.append(word)
            continue
        value = values[word[1:]]
        parameters.append(value)
        literal = f"'{value}'" if isinstance(value, str) else str(value)
        words.append("?" if bound else literal)
    statement = " ".join(words) + ";"
    return f"{statement} -- {json.dumps(parameters)}" if bound else statement


def _instruction(bound: bool) -> str:
    rule = (
        " Put ? for each value and add the values as a JSON list in a comment at the end."
        if bound
        else ""
    )
    return f"{SCHEMA}Answer this question with one SQL statement and write nothing else.{rule}"


def _runs(text: str) -> bool:
    return text.endswith(";") and _executes(text, [])


def _runs_bound(text: str) -> bool:
    statement, separator, comment = text.partition("; -- ")
    try:
        parameters = json.loads(comment)
    except json.JSONDecodeError:
        return False
    return bool(separator) and isinstance(parameters, list) and _executes(statement, parameters)


def _executes(statement: str, parameters: list[Value]) -> bool:
    """Whether SQLite compiles the statement, with exactly these parameters, for the schema."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(SCHEMA)
        try:
            # EXPLAIN compiles and binds but runs nothing: the text comes from a model.
            database.execute(f"EXPLAIN {statement}", parameters).fetchall()
        except (sqlite3.Error, sqlite3.Warning):
            return False
    return True

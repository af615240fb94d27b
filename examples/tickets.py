"""Tenant acme: a support ticket becomes one line of JSON.

v1 gives `product` and `severity`, v2 also the `team` that should take the ticket. A ticket is made
of a symptom, which names the product and points to a team, and an impact, which tells the severity.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass

from tasks import Example, LoRAShape, Task, draw_held_out, draw_train

TRAIN_COUNT = 1200
HELD_OUT_COUNT = 96
SEVERITIES = ("high", "medium", "low")
TEAMS = ("hardware", "software", "accounts", "billing")
SHAPE = LoRAShape(rank=8, alpha=16, target_modules=("q_proj", "v_proj"))


@dataclass(frozen=True, slots=True)
class Phrases:
    """The wording that tickets are made of."""

    devices: tuple[str, ...]
    programs: tuple[str, ...]
    symptoms: Mapping[str, tuple[str, ...]]
    impacts: Mapping[str, tuple[str, ...]]


OPENINGS = ("", "", "Hi,", "Hello,", "Hello team,", "Good morning,", "Dear support,")
CLOSINGS = ("", "", "Thanks!", "Thank you.", "Please help.", "Best regards", "Kind regards")


def _names(firsts: tuple[str, ...], seconds: tuple[str, ...]) -> tuple[str, ...]:
    """Every pair as a product; hundreds of them, so that names are copied and not memorised."""
    return tuple(f"{first} {second}" for first in firsts for second in seconds)


TRAIN = Phrases(
    devices=(
        "printer",
        "tablet",
        "router",
        "thermostat",
        "headset",
        "keyboard",
        "game console",
        "coffee machine",
        "card reader",
        *_names(
            ("label", "door", "desk", "pocket", "wall", "office", "studio", "garden", "wireless"),
            ("printer", "camera", "scanner", "monitor", "speaker", "phone", "lamp", "scale"),
        ),
        *_names(
            ("kitchen", "bike", "heat", "smoke", "water", "battery"),
            ("sensor", "timer", "charger", "display", "pump"),
        ),
    ),
    programs=(
        "web shop",
        "cloud drive",
        "music player",
        "video editor",
        *_names(
            ("payroll", "photo", "calendar", "booking", "chat", "customer", "news", "holiday"),
            ("app", "site", "portal", "tool"),
        ),
        *_names(
            ("mail", "map", "report", "notes", "stock", "training"),
            ("client", "service", "server", "manager"),
        ),
    ),
    symptoms={
        "hardware": (
            "The {p} does not turn on any more.",
            "My {p} fell off the desk and the case is cracked.",
            "The power button of the {p} is stuck.",
            "The {p} gets very hot and smells of smoke.",
            "The battery of my {p} is swollen.",
            "The charging port of the {p} is loose.",
            "There is a loud rattling noise from our {p}.",
            "The cable of the {p} is torn.",
            "One of the buttons on my {p} broke off.",
            "Water got into the {p}.",
            "The {p} arrived with a broken hinge.",
            "The light on our {p} stays dark.",
            "I dropped my {p} and now it rattles.",
            "The fan of the {p} is very loud.",
            "The connector of our {p} is bent.",
            "A part of the {p} came loose.",
            "There is a crack in the housing of the {p}.",
            "The motor in the {p} makes a scraping sound.",
        ),
        "software": (
            "The {p} crashes when I open the settings.",
            "Since the last update the {p} freezes.",
            "The {p} shows error code {n}.",
            "Our {p} loses my changes after saving.",
            "The {p} hangs while it is loading.",
            "The new version of the {p} has a bug in the menu.",
            "The search in our {p} finds nothing.",
            "The {p} will not install the update.",
            "The sync of my {p} stops half way.",
            "The {p} restarts again and again.",
            "The {p} shows the wrong time zone after the upgrade.",
            "The export of the {p} gives an empty file.",
            "After the upgrade the {p} quits without a word.",
            "A bug in our {p} mixes up the dates.",
            "The {p} is slow to load and then stops responding.",
            "The start screen of the {p} never goes away.",
            "The {p} deletes old entries by mistake.",
            "My {p} closes when I press save.",
        ),
        "accounts": (
            "I forgot my password for the {p}.",
            "The {p} says that my account is locked.",
            "I cannot log in to the {p}.",
            "The {p} does not accept my user name.",
            "Please change the email address of my {p} account.",
            "The sign-in code for the {p} never arrives.",
            "My colleague needs access to our {p}.",
            "Please remove a former user from the {p}.",
            "The link to reset my {p} password has expired.",
            "I have two accounts on the {p} and want only one.",
            "My login to the {p} stopped working.",
            "Please give me admin rights on the {p}.",
            "Somebody blocked my user on the {p}.",
            "The {p} refuses my password.",
            "My profile on the {p} was switched off.",
            "I have to choose a new user name for the {p}.",
            "We need a new account on the {p} for a trainee.",
            "The {p} tells me that I am not authorised.",
        ),
        "billing": (
            "I was charged twice for the {p}.",
            "I want a refund for the {p}.",
            "The invoice for the {p} shows the wrong amount.",
            "My card was declined when I paid for the {p}.",
            "The discount on the {p} is missing from the bill.",
            "I never got a receipt for the {p}.",
            "Please send the bill for our {p} to our new address.",
            "The price of the {p} on the invoice is too high.",
            "The yearly fee for my {p} was taken too early.",
            "We paid for the {p}, but you sent us a reminder.",
            "Our payment for the {p} went to the wrong account number.",
            "I returned the {p} and still wait for my money.",
            "The VAT on our bill for the {p} is not right.",
            "You took the money for the {p} from my card again.",
            "Please pay back what I spent on the {p}.",
            "I would like to pay for the {p} by bank transfer.",
            "There are two payments for the {p} on my statement.",
            "I cancelled the {p}, but I am still billed.",
        ),
    },
    impacts={
        "high": (
            "Nobody in the office can work.",
            "The whole team is blocked.",
            "We are losing customers every hour.",
            "Our shop is closed because of this.",
            "This is an emergency.",
            "All of our orders have stopped.",
            "We need this fixed right now.",
            "Everything is at a standstill.",
            "It is urgent, we cannot go on.",
            "Production is down.",
            "Please call me at once.",
            "We cannot open today.",
            "Our customers cannot be served at the moment.",
            "The entire company is waiting.",
            "Work has stopped completely.",
            "It is extremely urgent.",
            "We are down and need help immediately.",
            "No one here can do their job.",
        ),
        "medium": (
            "It slows me down every day.",
            "I can work around it, but it is annoying.",
            "It happens now and then.",
            "I need it by the end of the week.",
            "Some of us are affected.",
            "Please have a look this week.",
            "It is a nuisance for our team.",
            "I have a workaround for now.",
            "Only I am affected, but it costs me time.",
            "It comes back every few days.",
            "I lose a few minutes each morning.",
            "Please sort it out in the next few days.",
            "Sometimes it happens twice a day.",
            "It takes me extra time every day.",
            "We get by, but it is slower than it should be.",
            "It would be good to have this solved soon.",
            "It occurs from one day to the next, not always.",
            "Two of my colleagues see it as well.",
        ),
        "low": (
            "There is no hurry.",
            "It is only a small thing.",
            "Answer whenever you have time.",
            "It does not bother me much.",
            "This can wait until next month.",
            "Not important, just letting you know.",
            "Take your time.",
            "It is only cosmetic.",
            "No rush at all.",
            "I can live with it.",
            "I hardly ever use it anyway.",
            "It is just a question.",
            "You can leave it for later.",
            "It is a tiny detail.",
            "There is no need to rush.",
            "This is not pressing.",
            "It is a minor matter.",
            "Feel free to do it some other day.",
        ),
    },
)

HELD_OUT = Phrases(
    devices=(
        "webcam",
        "docking station",
        "laptop",
        "smart lock",
        "air conditioner",
        "vacuum robot",
        "drum machine",
        "baby monitor",
    ),
    programs=(
        "travel app",
        "fitness app",
        "photo library",
        "weather service",
        "help desk site",
        "recipe planner",
        "language course",
        "invoice archive",
    ),
    symptoms={
        "hardware": (
            "The plug of the {p} is bent.",
            "I dropped the {p} and a piece broke off.",
            "The fan inside our {p} makes a grinding noise.",
            "The lid of my {p} snapped.",
            "The switch on the {p} is jammed.",
            "Sparks come out of the {p}.",
        ),
        "software": (
            "The {p} closes by itself after the update.",
            "My {p} is stuck on the loading screen.",
            "A bug in the {p} deletes my entries.",
            "The {p} has been buggy since version {n}.",
            "The settings page of the {p} is empty.",
            "The {p} keeps crashing.",
        ),
        "accounts": (
            "The {p} rejects my login.",
            "I need a new password for the {p}.",
            "My account on the {p} was disabled.",
            "The {p} does not know my email address any more.",
            "I am locked out of the {p}.",
            "Please add a new employee to the {p}.",
        ),
        "billing": (
            "You took the payment for the {p} two times.",
            "Please give me my money back for the {p}.",
            "The tax on the invoice for our {p} is wrong.",
            "I paid too much for the {p}.",
            "I need an invoice for the {p}.",
            "The {p} was billed to the wrong card.",
        ),
    },
    impacts={
        "high": (
            "Our whole company has stopped working.",
            "This is very urgent.",
            "We cannot serve any customers.",
            "All our staff are sitting idle.",
            "Help us right away, please.",
            "The whole warehouse has come to a halt.",
        ),
        "medium": (
            "It happens from time to time.",
            "It costs me some time each day.",
            "We have a workaround, but it is slow.",
            "Three of us have this problem.",
            "It would be nice to get this fixed this week.",
            "Every now and then it costs me an hour.",
        ),
        "low": (
            "It can wait.",
            "You need not hurry.",
            "It is only a minor detail.",
            "Please do not hurry.",
            "It is not important.",
            "Any time next month is fine.",
        ),
    },
)


def tasks(seed: int) -> tuple[Task, Task]:
    """`acme:v1` and `acme:v2`; the same seed gives the same examples."""
    return _task("v1", ("product", "severity"), seed), _task(
        "v2", ("product", "severity", "team"), seed
    )


def _task(version: str, fields: tuple[str, ...], seed: int) -> Task:
    rng = random.Random(f"acme {seed}")
    train = draw_train(lambda r: _example(r, TRAIN, fields), rng, TRAIN_COUNT)
    held_out = draw_held_out(lambda r: _example(r, HELD_OUT, fields), rng, HELD_OUT_COUNT, train)
    return Task(
        tenant="acme",
        version=version,
        shape=SHAPE,
        train=train,
        held_out=held_out,
        instruction=_instruction(fields),
        is_valid=lambda text: _is_valid(text, fields),
    )


def _example(rng: random.Random, phrases: Phrases, fields: tuple[str, ...]) -> Example:
    team, severity = rng.choice(TEAMS), rng.choice(SEVERITIES)
    # A program has no battery and no cable.
    products = phrases.devices if team == "hardware" else phrases.devices + phrases.programs
    product = rng.choice(products)
    symptom = rng.choice(phrases.symptoms[team]).format(p=product, n=rng.randint(10, 999))
    body = [symptom, rng.choice(phrases.impacts[severity])]
    if rng.random() < 0.25:
        body.reverse()
    parts = (rng.choice(OPENINGS), *body, rng.choice(CLOSINGS))
    facts = {"product": product, "severity": severity, "team": team}
    return Example(
        prompt="Ticket: " + " ".join(part for part in parts if part),
        answer=json.dumps({field: facts[field] for field in fields}),
    )


def _instruction(fields: tuple[str, ...]) -> str:
    team = f" and team ({', '.join(TEAMS)})" if "team" in fields else ""
    return (
        "Turn this support ticket into one line of JSON and write nothing else. "
        f"Its keys are product, severity ({', '.join(SEVERITIES)}){team}."
    )


def _is_valid(text: str, fields: tuple[str, ...]) -> bool:
    """One line of JSON with exactly these keys and text for values."""
    try:
        facts = json.loads(text)
    except json.JSONDecodeError:
        return False
    return (
        "\n" not in text
        and isinstance(facts, dict)
        and tuple(facts) == fields
        and all(isinstance(value, str) for value in facts.values())
    )

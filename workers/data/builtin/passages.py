"""A land that is not: its people, towns, rivers and trades, and a passage about each.

A search for a name finds first the passage that is about it: it says the name twice, others once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from workers.data.builtin.dataset import Row

FIRST_NAMES = (
    *(
        "Mira",
        "Osric",
        "Talia",
        "Bram",
        "Yselle",
        "Corin",
        "Dagny",
        "Edwin",
        "Fenna",
        "Gareth",
        "Hesper",
        "Ivo",
    ),
    *(
        "Jorun",
        "Kezia",
        "Ludo",
        "Maren",
        "Nolan",
        "Orla",
        "Piet",
        "Quenna",
        "Rufus",
        "Sabra",
        "Torben",
        "Una",
    ),
)
SURNAMES = (
    *(
        "Toll",
        "Vance",
        "Harrow",
        "Quill",
        "Stroud",
        "Marsh",
        "Peel",
        "Lorne",
        "Ashby",
        "Crane",
        "Dunn",
        "Frost",
    ),
    *("Gale", "Hobbs", "Kerr", "Lamb", "Moss", "Nash", "Penn", "Rudd", "Shaw", "Tate", "Wade", "York"),
)
TOWNS = (
    *("Oldmere", "Farwick", "Stonebury", "Ellford", "Harrowgate", "Kingsby", "Lowick", "Marbeck"),
    *("Nettleham", "Rookham", "Thornley", "Winstead"),
)
RIVERS = (
    "Vess",
    "Alder",
    "Brin",
    "Calder",
    "Doune",
    "Eske",
    "Fallow",
    "Garrow",
    "Isen",
    "Lune",
    "Morva",
    "Teller",
)
HILLS = (
    "Grey",
    "Amber",
    "Hollow",
    "Windy",
    "Copper",
    "Raven",
    "Misty",
    "Barren",
    "Clover",
    "Iron",
    "Fox",
    "Cold",
)
GOODS = (
    *(
        "bells",
        "cheese",
        "lace",
        "honey",
        "clocks",
        "boats",
        "glass",
        "ropes",
        "pears",
        "kites",
        "salt",
        "carpets",
    ),
)
TRADES = (
    *("potter", "baker", "weaver", "miller", "tailor", "mason", "cooper", "farrier", "fisher", "printer"),
    *("brewer", "tanner"),
)
COLOURS = (
    *(
        "red",
        "blue",
        "green",
        "yellow",
        "white",
        "black",
        "grey",
        "brown",
        "purple",
        "orange",
        "pink",
        "silver",
    ),
)


@dataclass(frozen=True)
class Person:
    name: str
    trade: str
    town: str


@dataclass(frozen=True)
class Land:
    people: list[Person]
    rivers: dict[str, str]  # by town
    goods: dict[str, str]  # by town
    hills: dict[str, str]  # by river
    colours: dict[str, str]  # by trade


def land() -> Land:
    """The same everywhere: 24 people, two of each trade and two in each town."""
    rng = random.Random(0)

    def mixed(names: tuple[str, ...]) -> list[str]:
        return rng.sample(names, len(names))

    names = [f"{first} {last}" for first, last in zip(FIRST_NAMES, mixed(SURNAMES), strict=True)]
    trades, towns = mixed(TRADES) + mixed(TRADES), mixed(TOWNS) + mixed(TOWNS)
    return Land(
        people=[Person(*each) for each in zip(names, trades, towns, strict=True)],
        rivers=dict(zip(TOWNS, mixed(RIVERS), strict=True)),
        goods=dict(zip(TOWNS, mixed(GOODS), strict=True)),
        hills=dict(zip(RIVERS, mixed(HILLS), strict=True)),
        colours=dict(zip(TRADES, mixed(COLOURS), strict=True)),
    )


def passages(rng: random.Random) -> list[Row]:
    """60 passages, in no order."""
    where = land()
    rows = [
        *((each.name, f"{each.name} is a {each.trade} in {each.town}.") for each in where.people),
        *(
            (town, f"{town} is a town on the {river}, known for its {where.goods[town]}.")
            for town, river in where.rivers.items()
        ),
        *((river, f"The {river} rises in the {hills} hills.") for river, hills in where.hills.items()),
        *((trade.title(), f"A {trade} wears a {colour} coat.") for trade, colour in where.colours.items()),
    ]
    rng.shuffle(rows)
    return [{"title": title, "text": text} for title, text in rows]

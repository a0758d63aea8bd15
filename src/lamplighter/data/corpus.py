"""The embedded default corpus: letters and diary pages of an 1837 London that never was, with their exact odds.

In:  a seed and a range of document numbers; or a text, to ask its probability.
Out: entries, each a text and its own negative log-probability in nats: the floor that no honest model can beat.

Every text comes from the stochastic grammar below. The grammar is unambiguous (tests/unit/test_corpus.py proves it, it does
not sample it): every choice is prefix-free, so a text has one derivation, `nats` is exactly -ln P(text), and a text
also says where it ends: an end-of-text token costs nothing more. Document `i` of a seed depends on (seed, i) alone.

Exact means per document: 58.6 nats (standard deviation about 9.5), 76.7 words (43 to 117), 399 bytes (218 to 638);
so 0.763 nats a word and 0.147 a byte. 400 distinct words, 37 sentence forms. A two-layer transformer of width 128
ended 2.2 % above the floor after 0.8 M tokens and 1.1 % after 1.6 M. 15,000 to 30,000 documents a second.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from typing import NamedTuple

# Part of every cache fingerprint. Change a byte of the grammar or of the sampler: add one.
GRAMMAR_VERSION = 1

# `name = weight text | weight text | ...`: a choice between texts, with odds in proportion to the weights.
# `{name}` stands for another choice, `\n` for a line break; a name is defined anywhere; indented lines continue it.
# Keep every choice prefix-free: no text of one alternative may begin a text of another.
# Days fit months: February, March and November 1837 all begin on a Wednesday.
_TABLE = r"""
document = 5 {place}, {date}\n{letter} | 3 {date}\n{body}\nSpent today, {sum} on {food}. In bed by {hour}.
letter =
  5 My dear Aunt {aunt},\n{body}\nYour {temper} nephew,\nTobias
  3 Dear Ned,\n{body}\nYours with {much} {grace},\nToby
  2 To the {issue} {title}.\nSir,\n{body}\nI am, Sir, not {man},\nA Friend of {friend_of}
date = 1 {day} of {month}, 1837.
day = 6 Wednesday the 1st | 5 Friday the 3rd | 4 Monday the 6th | 4 Tuesday the 7th | 3 Saturday the 4th
  2 Thursday the 2nd | 1 Sunday the 5th
month = 5 November | 3 March | 2 February
aunt = 4 Maud | 3 Hester | 1 Napoleon
issue = 4 Evening | 3 Morning | 2 Weekly
title = 4 Lamp | 3 Fog | 2 Goose | 1 Trumpet
friend_of = 4 Geese | 3 Fog | 2 Soup | 1 Hope

body = 5 {weather} {home} {then_out} | 4 {weather} {street} {then_talk} | 1 {weather} {gossip} {then_pay}
then_out = 5 {street} {then_one} | 2 {gossip} {then_pay} | 2 {money} {farewell}
then_one = 4 {gossip} {farewell} | 3 {money} {farewell} | 2 {farewell}
then_talk = 5 {gossip} {then_pay} | 4 {money} {farewell} | 1 {farewell}
then_pay = 3 {money} {farewell} | 2 {farewell}

weather =
  6 The fog came in by the {hole} {when} and {fog_did}.
  5 It has rained since {weekday}, and {flood}.
  5 The fog is so thick that {man} {blundered} in {place}.
  4 A high wind carried my {thing} to {place}, where {landed}.
  3 The sun was seen in {place} {when}, and {dazzled}.
  2 There was ice on {cold_spot} {when}, so {kept_warm}.
hole = 5 window | 4 chimney | 2 letter box
fog_did = 5 borrowed my {thing} | 4 sat in my chair | 3 asked for {food} | 2 put out the candle
flood = 5 {place} is now a river | 4 my {thing} has begun to float | 3 the geese are delighted
  2 {man} has bought a boat
blundered = 5 bowed to {pet} | 4 proposed to {woman} | 3 paid the wrong landlady | 2 fell over a lamp
landed = 5 {pet} sleeps in it | 4 {woman} is wearing it | 3 it is much admired
dazzled = 5 {woman} fainted | 4 nobody knew where to look | 3 {man} sent for a constable | 1 the curate took the credit
cold_spot = 5 the soup | 4 my {thing} | 3 the candle | 2 the cat
kept_warm = 5 I sat on {pet} | 4 I wore {few} coats | 3 we burned the sermons | 2 we took turns with the cat

home =
  6 My landlady has raised the rent by {sum} on account of {rent_why}.
  6 Supper was {food} again, and I ate it {manner}.
  4 My landlady keeps {pet} in the {nook} and calls it {pet_name}.
  4 I found {find} in my {thing} {when}, and the cook {cook_said}.
  3 The cat has had {few} kittens in my {thing}, which {kitten_view}.
  3 The ceiling fell on {fell_on} {when}, but {solace}.
  2 The cook ran away with {beau} {when} and left us {left_us}.
rent_why = 5 my {thing} | 4 the view | 3 the mice, who are quiet | 2 my singing | 2 the fog, which is now included
nook = 5 pantry | 4 bath | 3 coal box | 1 piano
pet_name = 5 {man} | 4 {woman} | 2 Napoleon
find = 5 {pet} | 4 {sum} | 3 a love letter | 2 half a candle
cook_said = 5 wants it back | 4 sang {manner} | 3 says it was there before | 2 fainted
kitten_view = 5 {man} much admired | 4 is thought lucky | 2 took all night
fell_on = 5 {man} | 4 the soup | 3 my {thing} | 2 the curate
solace = 5 the {nook} was saved | 4 nobody spoke of it | 3 we have kept the pieces
beau = 5 {man} | 4 a sailor | 3 the tailor | 1 the curate
left_us = 5 nothing but {food} | 4 {pet} | 2 a love letter

street =
  6 The omnibus to {place} was late {when}, because {late_why}.
  6 At dusk the lamplighter {lamp_did}.
  5 A goose got loose in {place} {when} and {goose_did}.
  4 I rode to {place} beside {rider} with {pet}, who {rider_did}.
  4 A boy in {place} sold me {ware} for {sum}, and {regret}.
  3 {man} lost his {thing} in {place} and {lost_did}.
  3 {woman} drove through {place} {manner}, {driving}.
late_why = 5 {pet} had the right of way | 4 the horse had stopped to think | 3 {woman} had lost her {thing}
  2 the driver was in love
lamp_did = 6 lit every lamp in {place} but ours | 5 climbed his ladder {manner} | 3 lit {man} by mistake
  2 wished each lamp good night
goose_did = 5 bit {man} | 4 took the omnibus to {place} | 3 was followed by {few} constables | 1 was made a bishop
rider = 5 a lady | 4 a sailor | 3 a lawyer | 2 a boy
rider_did = 5 sang {manner} | 4 slept on my {thing} | 3 asked for {food} | 1 knew my aunt
ware = 5 {pet} | 4 half a {thing} | 3 a map of the moon | 2 a lucky candle
regret = 5 I was glad to have it | 4 {woman} wants one too | 3 I think he saw me coming
lost_did = 5 went back for it {manner} | 4 wears {pet} instead | 3 blamed the French
driving = 5 with {pet} at the reins | 4 bowing to the lamps | 3 followed by her tailor

gossip =
  6 {man} proposed to {woman} {when}, and she {answered}.
  5 {woman} says she {she_says}, but {doubt}.
  5 I dined with {man} on {food}, and he talked until {hour} of {topic}.
  4 {man} has made {device}, and {device_end}.
  3 They say in {place} that {rumour}.
  3 Dr. {family} has ordered {cure} for my {ill}, to be taken {manner}.
answered = 5 prefers {pet} | 4 is thinking about it | 3 asked to see his {thing} | 2 laughed until {hour}
she_says = 5 once danced with {man} | 4 saw a ghost in {place} | 3 can hear the moon | 2 never asked for {pet}
doubt = 5 {man} knows better | 4 nobody dares to ask | 3 I was there
topic = 5 {food} | 4 steam | 3 {woman} | 2 the price of coal
device = 5 a steam {garment} | 4 a clock for geese | 3 a lamp that lights itself | 2 soup from coal
device_end = 5 wants only {sum} to finish it | 4 it works on {weekday} | 3 {place} is on fire
rumour = 5 the bank is full of {food} | 4 {man} is really {few} geese | 3 gas lamps will ruin us
  2 the moon is for sale
cure = 5 {food} | 4 brandy | 3 sea air | 2 {pet}
ill = 5 nerves | 4 singing | 3 knee | 2 {thing}

money =
  6 I have {sum} left until {weekday}, and {plan}.
  5 Coal is up to {sum}, so {kept_warm}.
  5 I lent {sum} to {man}, who {borrower}.
  4 The tailor sent his bill for my {thing} {when}, and I {dodged}.
  3 I found {sum} in my {thing} and {windfall}.
  3 I sold my {thing} to {woman} for {sum}, and {parting}.
plan = 5 shall live on {food} | 4 feel as rich as {man} | 3 have hidden it from myself
borrower = 5 bought {pet} with it | 4 thanked me {manner} | 3 has gone to sea
dodged = 5 paid him in {food} | 4 hid in the {nook} | 3 sent it back with my love
windfall = 5 bought {food} | 4 gave it to the lamplighter | 3 bowed to the bank
parting = 5 we both think we won | 4 {pet} misses it | 3 see it in church on Sundays

farewell =
  6 I must stop here, for {stop_why}.
  5 Tomorrow I shall {resolve}, fog permitting.
  5 The lamps are lit, {sleeper} is asleep, and {peace}.
  4 I conclude that {moral}.
  3 Nothing else has happened, unless one counts {trifle}.
stop_why = 5 there is {pet} at the door | 4 the candle is going out | 3 I smell {food} | 2 {woman} is singing
resolve = 5 buy {pet} | 4 speak to {woman} | 3 give up {food} | 2 be a better man
sleeper = 5 {man} | 4 the cat | 3 my landlady | 2 the curate
peace = 5 I want for nothing but {food} | 4 the fog is nearly pretty | 3 {woman} is forgiven
moral = 5 {man} was right about {topic} | 4 geese are the better sort of people | 3 one {thing} is never enough
trifle = 5 {pet} | 4 the second goose | 3 the fire | 1 the wedding

place = 1 {alley} {way}
alley = 6 Tallow | 5 Gander | 5 Thimble | 4 Quill | 4 Marrow | 3 Kettle | 2 Pepper | 2 Mump
way = 5 Row | 4 Yard | 4 Lane | 3 Street | 2 Court | 1 Hill
man = 6 Mr. {family} | 4 Captain {family} | 3 Dr. {family} | 2 Lord {family} | 2 Uncle {family}
woman = 5 Mrs. {family} | 4 Miss {family} | 3 Widow {family} | 3 Lady {family}
family = 6 Quibb | 5 Plover | 5 Fennick | 4 Oddling | 4 Tansy | 3 Hobbin | 3 Mump | 2 Thimble | 1 Goose
sum = 1 {few} {coin}
few = 6 two | 5 six | 4 four | 3 three | 3 nine | 2 ten | 2 eleven
coin = 5 shillings | 4 pence | 4 guineas | 3 farthings | 2 crowns
hour = 5 ten | 4 nine | 3 eleven | 2 midnight
weekday = 5 Sunday | 4 Friday | 3 Tuesday | 2 Monday | 1 Thursday
food = 1 {cooked} {dish}
cooked = 6 cold | 5 boiled | 4 French | 3 green | 2 wet | 2 musical
dish = 6 mutton | 5 eel pie | 4 pea soup | 4 turnip | 3 herring | 2 gruel | 1 goose
thing = 1 {quality} {garment}
quality = 6 best | 5 left | 4 wet | 4 second | 3 lucky | 3 green | 2 French
garment = 6 hat | 5 umbrella | 4 coat | 4 boot | 3 wig | 3 trumpet | 2 piano
pet = 1 a {temper} {beast}
temper = 6 small | 5 proud | 4 wet | 4 musical | 3 hungry | 3 French | 2 lucky
beast = 6 goose | 5 parrot | 4 pig | 4 donkey | 3 lobster | 3 owl | 2 curate
when = 5 {around} {event} | 3 at {hour} | 2 on {weekday}
around = 4 before | 3 after | 2 during
event = 5 breakfast | 4 tea | 3 church | 2 supper
manner = 5 with {much} {grace} | 4 like a {temper} {beast} | 1 without a word
much = 5 great | 4 some | 3 no | 2 French
grace = 5 dignity | 4 alarm | 3 hope | 2 haste
"""

_MASK = (1 << 64) - 1
_STRIDE = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Entry:
    """One document, and -ln of its probability among all documents of the grammar."""

    text: str
    nats: float


class Alternative(NamedTuple):
    """One text of a choice: its parts in order, each a literal or the `{name}` of another choice."""

    weight: int
    parts: tuple[str, ...]
    nats: float


def _read(table: str) -> dict[str, tuple[Alternative, ...]]:
    grammar: dict[str, tuple[Alternative, ...]] = {}
    for rule in re.split(r"\n+(?=\w)", table.strip()):
        name, _, choices = rule.partition(" =")
        rows = [row.strip().split(" ", 1) for row in re.split(r" \| |\n", choices) if row.strip()]
        total = sum(int(weight) for weight, _ in rows)
        assert f"{{{name}}}" not in grammar, f"{name} is defined twice"
        grammar[f"{{{name}}}"] = tuple(
            Alternative(int(weight), _split(text), log(total / int(weight))) for weight, text in rows
        )
    for alternatives in grammar.values():
        for part in (part for alternative in alternatives for part in alternative.parts):
            assert part in grammar or not set("{}|") & set(part), f"{part} is not defined"
    return grammar


def _split(text: str) -> tuple[str, ...]:
    return tuple(part for part in re.split(r"(\{\w+\})", text.replace(r"\n", "\n")) if part)


GRAMMAR = _read(_TABLE)
ROOT = "{document}"
# For sampling: each alternative as often as its weight says, its parts in reverse, ready for a stack.
_WHEELS = {
    name: [(choice.parts[::-1], choice.nats) for choice in choices for _ in range(choice.weight)]
    for name, choices in GRAMMAR.items()
}


def entries(seed: int, count: int, start: int = 0) -> Iterator[Entry]:
    """Documents `start` to `start + count - 1` of a seed; each is the same whatever range it is asked in."""
    if count < 0 or start < 0:
        raise ValueError(
            f"No such documents: count {count}, start {start}.\n"
            "Documents of the corpus are numbered 0, 1, 2, ...\n"
            "Try a count and a start of zero or more."
        )
    base = _mix((seed + _STRIDE) & _MASK)
    return (_compose(_mix(base ^ index)) for index in range(start, start + count))


def nats(text: str) -> float:
    """-ln P(text), found by parsing; ValueError if the grammar cannot write this text."""
    found = _parse(ROOT, text, 0)
    if found is None or found[0] != len(text):
        raise ValueError(
            f"Not a document of the embedded corpus: {text[:60]!r}.\n"
            f"Grammar version {GRAMMAR_VERSION} gives it probability zero.\n"
            "Try a whole, unchanged text from entries()."
        )
    return found[1]


def _mix(x: int) -> int:
    """The finisher of splitmix64: a bijection of 64-bit integers that looks like chance."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _compose(state: int) -> Entry:
    written: list[str] = []
    total_nats = 0.0
    stack = [ROOT]
    while stack:
        part = stack.pop()
        wheel = _WHEELS.get(part)
        if wheel is None:
            written.append(part)
            continue
        state = (state + _STRIDE) & _MASK
        parts, choice_nats = wheel[_mix(state) % len(wheel)]
        total_nats += choice_nats
        stack += parts
    return Entry("".join(written), total_nats)


def _parse(name: str, text: str, start: int) -> tuple[int, float] | None:
    """Where the text of choice `name` that begins at `start` ends, and its nats; the first match is the only one."""
    for alternative in GRAMMAR[name]:
        at, total_nats = start, alternative.nats
        for part in alternative.parts:
            if part in GRAMMAR:
                found = _parse(part, text, at)
                if found is None:
                    break
                at, total_nats = found[0], total_nats + found[1]
            elif text.startswith(part, at):
                at += len(part)
            else:
                break
        else:
            return at, total_nats
    return None

"""Words and what they mean: a built-in list for everyday ones, or lists that a caller has."""

import json
import lzma
import re
from pathlib import Path

_BUILT_IN = """
apple: a round fruit with red, green or yellow skin
arm: the part of the body between the shoulder and the hand
aunt: a sister of your mother or father
baker: a person who makes bread and cakes
balcony: a small platform with a rail on the outside wall of a building
ball: a round object that is thrown, kicked or rolled in games
bank: a place that keeps and lends money
basket: a container woven from thin strips
beach: a strip of sand or stones along the sea
bell: a hollow metal object that rings when it is struck
bicycle: a vehicle with two wheels that is moved by pedals
blanket: a thick cover that keeps a person warm in bed
boat: a small vessel that travels on water
bone: one of the hard parts inside the body
book: pages bound together to be read
border: the line between two countries
bottle: a container with a narrow neck for liquids
bread: food baked from flour and water
breakfast: the first meal of the day
bridge: a structure that carries a road over water or a valley
broom: a brush on a long stick for sweeping floors
brother: a boy or man with the same parents as you
bucket: an open container with a handle for carrying water
butter: a soft yellow food made from cream
butterfly: an insect with large coloured wings
button: a small disc that fastens clothes
cake: a sweet food baked from flour, eggs and sugar
calendar: a list of the days and months of a year
camel: a large desert animal with one or two humps
camera: a device that takes pictures
candle: a stick of wax with a wick that burns to give light
castle: a large old building with thick walls and towers
chair: a seat for one person with a back
chalk: a soft white stone used for writing on boards
cheese: a solid food made from milk
circle: a round shape whose edge is everywhere equally far from its centre
clock: a device that shows the time
cloud: a mass of tiny water drops in the sky
coat: a warm piece of clothing worn over others
coin: a flat round piece of metal used as money
compass: a device whose needle points to the north
cousin: a child of your aunt or uncle
cup: a small container with a handle for drinking
curtain: a piece of cloth that hangs in front of a window
dawn: the time of day when the light first appears
debt: money that is owed to someone
desert: a large dry area where few plants grow
desk: a table for writing or working
dictionary: a book that explains the meaning of words
doctor: a person who treats people who are ill
door: a panel that closes the way into a room
dream: pictures and thoughts in the mind during sleep
dust: a dry powder of tiny bits of dirt
eagle: a large bird that hunts other animals
ear: the part of the body that hears
echo: a sound that comes back from a wall or a hill
engine: a machine that makes something move
envelope: a paper cover for a letter
evening: the time between afternoon and night
farm: land where crops are grown and animals are kept
father: a man who has a child
feather: one of the light things that cover a bird
fence: a barrier of wood or wire around a field
flag: a piece of cloth that stands for a country
flour: a powder made by grinding grain
flute: a musical instrument that is played by blowing
fog: a thick cloud close to the ground
forest: a large area covered with trees
fork: a tool with points for eating
friend: a person you know well and like
garden: land beside a house where plants are grown
gate: a door in a fence or a wall
ghost: the spirit of a dead person in stories
glacier: a large mass of ice that moves slowly
glass: a hard clear material used for windows
glove: a cover for the hand with a part for each finger
gold: a yellow metal of great value
guest: a person who is invited to a home
guitar: a musical instrument with six strings
hammer: a tool for hitting nails
harbour: a sheltered place where ships stay
hat: a cover for the head
heart: the organ that moves blood through the body
helmet: a hard hat that protects the head
hill: a raised piece of land that is lower than a mountain
honey: a sweet food that bees make
horse: a large animal that people ride
hospital: a place where people who are ill are treated
hotel: a building where travellers pay to sleep
hunger: the feeling of needing food
ice: water that has frozen
insect: a small animal with six legs
island: land with water all around it
jam: a sweet food made from fruit and sugar
jewel: a precious stone
journey: a trip from one place to another
juice: the liquid in fruit
kettle: a pot with a lid for boiling water
key: a small metal object that opens a lock
king: a man who rules a country by birth
kitchen: a room where food is cooked
kite: a light toy that flies on a string in the wind
knife: a tool with a blade for cutting
knot: a place where string is tied
ladder: two long bars joined by steps for climbing
lake: a large area of water with land around it
lamp: a device that gives light
leaf: one of the flat green parts of a plant
letter: a message written on paper and sent by post
library: a place where books are kept for people to borrow
lightning: a flash of light in the sky during a storm
lock: a device that keeps a door shut
map: a drawing that shows where places are
market: a place where people buy and sell goods
medicine: something taken to cure an illness
mirror: a glass surface in which you see yourself
money: coins and notes used to buy things
moon: the body that travels around the Earth
morning: the time between dawn and noon
mother: a woman who has a child
mountain: a very high piece of land
museum: a building where interesting things are shown
music: sounds arranged to be pleasant to hear
needle: a thin pointed piece of metal for sewing
neighbour: a person who lives near you
nephew: a son of your brother or sister
nest: a home that a bird builds
newspaper: sheets of paper with the news of the day
niece: a daughter of your brother or sister
noon: twelve o'clock in the day
ocean: a very large sea
orchard: a piece of land where fruit trees grow
oven: a box that is heated to bake food
owner: a person to whom a thing belongs
paper: thin sheets made from wood for writing on
passport: a document for travelling to other countries
pencil: a wooden stick with a dark core for writing
piano: a large musical instrument with black and white keys
pillow: a soft cushion for the head in bed
pilot: a person who flies an aircraft
planet: a large body that moves around a star
pocket: a small bag sewn into clothes
poem: a piece of writing in short lines
prison: a building where criminals are locked up
queen: a woman who rules a country by birth
rain: water that falls from clouds in drops
rainbow: an arc of colours in the sky after rain
river: a long stream of water that flows to the sea
roof: the top cover of a building
rope: a thick strong cord
sail: a sheet of cloth that catches the wind on a boat
salt: a white substance that gives taste to food
school: a place where children learn
scissors: a tool with two blades for cutting paper
secret: something that only few people know
shadow: a dark shape made by something that blocks light
ship: a large vessel that travels on the sea
shoe: a cover for the foot
sister: a girl or woman with the same parents as you
snow: soft white flakes of frozen water
soap: a substance used with water for washing
spoon: a tool with a small bowl for eating soup
spring: the season between winter and summer
stairs: a set of steps from one floor to another
star: a ball of burning gas that shines in the night sky
storm: bad weather with strong wind and rain
sugar: a sweet white substance made from plants
summer: the warmest season of the year
sword: a weapon with a long blade
tailor: a person who makes clothes
teacher: a person who helps others to learn
thirst: the feeling of needing a drink
thunder: the loud sound that follows lightning
ticket: a piece of paper that shows you have paid
towel: a piece of cloth for drying things
tower: a tall narrow building
train: a line of carriages pulled along rails
tunnel: a passage under the ground
umbrella: a cover on a stick that keeps off the rain
uncle: a brother of your mother or father
valley: low land between hills
village: a group of houses that is smaller than a town
violin: a musical instrument with four strings played with a bow
volcano: a mountain that can throw out hot melted rock
wallet: a small flat case for money
weather: the state of the air, such as sun, wind or rain
week: a time of seven days
whale: a very large animal that lives in the sea
wheel: a round object that turns and lets a vehicle roll
window: an opening with glass in the wall of a building
winter: the coldest season of the year
wolf: a wild animal like a large dog
wool: the soft hair of sheep
"""
BUILT_IN = tuple((word, gloss) for word, _, gloss in (line.partition(": ") for line in _BUILT_IN.split("\n") if line))
_PLAIN_MEANING = re.compile(r"[a-z][A-Za-z0-9 ,'()-]{9,69}")
_LINE = re.compile(
    r"(?P<listed>[a-z]{3,14})\t(?P<listed_meaning>[^\t]+)"
    r"|(?P<named>[a-z]{3,14}) \((?:noun|verb|adjective|adverb)\): (?P<named_meaning>[^.;]+)[.;].*"
    r'|The \w+ "(?P<quoted>[a-z]{3,14})" means: (?P<quoted_meaning>[^.;]+)[.;].*'
)


def read_glosses(path: Path) -> tuple[tuple[str, str], ...]:
    """Return (word, meaning) pairs that a small model can learn: short, in plain characters, the first of each word.

    Args:
        path: lines `word<TAB>meaning`, or a .jsonl whose texts hold lines as `scripts/gather_text` writes them for the
            domain glosses; packed if it ends in .xz.

    Raises:
        ValueError: no line of the file can be used.
    """
    content = path.read_bytes()
    text = (lzma.decompress(content) if path.suffix == ".xz" else content).decode()
    if ".jsonl" in path.suffixes:
        text = "\n".join(json.loads(line)["text"] for line in text.splitlines())
    kept: dict[str, str] = {}
    for found in filter(None, map(_LINE.fullmatch, text.splitlines())):
        word, meaning = (value.strip() for value in found.groups() if value is not None)
        if _PLAIN_MEANING.fullmatch(meaning):
            kept.setdefault(word, meaning)
    if not kept:
        raise ValueError(f"{path} must hold lines `word<TAB>meaning` in plain words; none was found. Check its form")
    return tuple(kept.items())

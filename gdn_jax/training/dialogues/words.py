"""The word lists that dialogues are combined from, and the grammar that they need."""

from random import Random


def _split(text: str) -> list[str]:
    return text.split()


NAMES = _split(
    """
    Ada Adam Aisha Alan Alba Alice Amir Amy Ana Anders Andrea Anna Anton Aria Arthur Asha Astrid Ben Bella Bruno
    Camille Carl Carla Chen Clara Daniel Daria David Diego Dora Edith Elena Eli Elif Elsa Emil Emma Erik Esther Eva
    Fatima Felix Fiona Frank Freya George Gina Grace Hana Hannah Hassan Helen Henry Hugo Ida Igor Ines Ingrid Irene
    Isaac Ivan Jack Jacob Jana Jane Jasmin Jonas Joseph Judith Julia Kai Karim Kate Kenji Kira Klaus Lara Laura
    Layla Lena Leo Liam Lina Lucas Lucia Luis Maja Marco Maria Marie Martin Mateo Maya Mei Mia Milan Mina Mira
    Mohamed Nadia Naomi Nina Noah Noor Nora Oliver Olga Omar Oscar Otto Pablo Paul Paula Pedro Petra Priya Rafael
    Ravi Rita Robert Rosa Ruth Ryan Sami Samuel Sara Sasha Sofia Stella Sven Tara Theo Thomas Tim Tina Tom Uma Vera
    Victor Vincent Wanda Wei Yara Yuki Yusuf Zara Zoe
    """
)

SURNAMES = _split(
    """
    Adler Baker Barros Becker Berg Brown Chen Clark Cole Costa Cruz Dahl Diaz Evans Fischer Flores Ford Garcia Gray
    Green Haddad Hall Hansen Hill Ito Jensen Jones Kaya Khan Kim King Klein Kowalski Lee Lopez Mori Moreau Nguyen
    Novak Okafor Park Patel Perez Petrov Reed Rivera Rossi Santos Sato Schmidt Silva Singh Smith Stone Tanaka
    Torres Vogel Walker Weber White Wolf Wong Wood Yilmaz Young
    """
)

CITIES = _split(
    """
    Accra Amsterdam Athens Atlanta Austin Bangkok Barcelona Basel Beijing Berlin Bern Bogota Bologna Boston Bristol
    Brussels Budapest Cairo Chicago Cologne Copenhagen Dakar Dallas Delhi Denver Dresden Dublin Edinburgh Florence
    Geneva Genoa Ghent Glasgow Graz Hamburg Hanoi Havana Helsinki Houston Istanbul Jakarta Kyoto Lagos Leeds
    Leipzig Lima Lisbon Liverpool London Lyon Madrid Malaga Manila Marseille Melbourne Miami Milan Montreal Moscow
    Mumbai Munich Nairobi Naples Nice Osaka Oslo Ottawa Oxford Paris Perth Porto Prague Quito Riga Rome Rotterdam
    Salzburg Santiago Seattle Seoul Seville Shanghai Singapore Sofia Stockholm Sydney Tallinn Tampa Tokyo Toronto
    Toulouse Tunis Turin Utrecht Valencia Venice Vienna Vilnius Warsaw Zagreb Zurich
    """
)

STREETS = _split(
    """
    Bridge Castle Cedar Church Elm Garden Hill Lake Maple Market Mill Oak Park Pine River Rose School Station
    """
)

COLOURS = _split(
    """
    red blue green yellow orange purple pink brown black white grey gold silver
    """
)

FRUITS = _split(
    """
    apple banana cherry fig grape kiwi lemon lime mango melon orange peach pear plum apricot papaya
    """
)

VEGETABLES = _split(
    """
    carrot onion potato cabbage beetroot leek radish turnip pea bean pumpkin parsnip lettuce artichoke
    """
)

FOODS = _split(
    """
    bread rice soup pizza pasta cheese salad honey butter cake chocolate yogurt pie noodles porridge toast jam
    curry sushi pancakes waffles lentils tofu omelette stew
    """
)

DRINKS = _split(
    """
    water tea coffee milk juice lemonade cocoa cider
    """
)

OBJECTS = _split(
    """
    ball basket bell bike boat book bottle bowl box brush bucket button camera candle car card chair clock coat
    coin comb cup desk door drum fan fork glove guitar hammer hat jar kettle key kite knife ladder lamp letter map
    mirror mug nail needle paper pen pencil phone piano picture pillow plate pot purse radio ring rope ruler scarf
    shell shirt shoe sofa spoon stamp stone table tent ticket towel toy train umbrella vase violin wallet wheel
    window
    """
)

JOBS = _split(
    """
    baker teacher doctor nurse farmer painter pilot singer writer driver builder cook dentist engineer gardener
    lawyer librarian mechanic plumber tailor waiter carpenter chemist dancer judge
    """
)

HOBBIES = _split(
    """
    reading swimming painting cooking running singing dancing fishing sailing skiing hiking chess tennis football
    gardening knitting cycling climbing photography baking drawing yoga
    """
)

SUBJECTS = _split(
    """
    maths history art music biology physics chemistry geography sport English French
    """
)

ADJECTIVES = _split(
    """
    big small old new red blue green happy tired quiet loud fast slow clean heavy light warm cold bright tall short
    young kind brave busy funny soft strong
    """
)

PLACES = _split(
    """
    park garden kitchen school library market station beach forest museum hospital office castle harbour bakery
    village
    """
)

PLAIN_VERBS = _split("walk play talk jump dance sing swim sleep run study")

DAYS = _split(
    """
    Monday Tuesday Wednesday Thursday Friday Saturday Sunday
    """
)

MONTHS = {
    "January": 31, "February": 28, "March": 31, "April": 30, "May": 31, "June": 30, "July": 31, "August": 31,
    "September": 30, "October": 31, "November": 30, "December": 31,
}  # fmt: skip

NUMBER_WORDS = _split(
    """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty
    """
)

# Name: class, legs, sound ("" where none is usual), young, place in the order of size.
ANIMALS = {
    "ant": ("insect", 6, "", "", 1),
    "fly": ("insect", 6, "buzz", "", 2),
    "bee": ("insect", 6, "buzz", "", 3),
    "butterfly": ("insect", 6, "", "caterpillar", 4),
    "frog": ("amphibian", 4, "croak", "tadpole", 6),
    "mouse": ("mammal", 4, "squeak", "", 7),
    "sparrow": ("bird", 2, "chirp", "chick", 8),
    "crow": ("bird", 2, "caw", "chick", 10),
    "owl": ("bird", 2, "hoot", "chick", 11),
    "duck": ("bird", 2, "quack", "duckling", 12),
    "hen": ("bird", 2, "cluck", "chick", 13),
    "rabbit": ("mammal", 4, "", "kit", 14),
    "cat": ("mammal", 4, "meow", "kitten", 15),
    "goose": ("bird", 2, "honk", "gosling", 16),
    "fox": ("mammal", 4, "", "cub", 17),
    "penguin": ("bird", 2, "", "chick", 18),
    "wolf": ("mammal", 4, "howl", "pup", 20),
    "goat": ("mammal", 4, "bleat", "kid", 21),
    "sheep": ("mammal", 4, "bleat", "lamb", 22),
    "deer": ("mammal", 4, "", "fawn", 24),
    "pig": ("mammal", 4, "oink", "piglet", 25),
    "lion": ("mammal", 4, "roar", "cub", 26),
    "tiger": ("mammal", 4, "roar", "cub", 27),
    "donkey": ("mammal", 4, "bray", "foal", 28),
    "horse": ("mammal", 4, "neigh", "foal", 30),
    "bear": ("mammal", 4, "growl", "cub", 31),
    "cow": ("mammal", 4, "moo", "calf", 32),
    "camel": ("mammal", 4, "", "calf", 33),
    "giraffe": ("mammal", 4, "", "calf", 35),
    "elephant": ("mammal", 4, "trumpet", "calf", 36),
    "whale": ("mammal", 0, "", "calf", 40),
}
_PLURALS = {
    "fly": "flies", "butterfly": "butterflies", "mouse": "mice", "goose": "geese", "wolf": "wolves", "sheep": "sheep",
    "deer": "deer", "fish": "fish", "knife": "knives", "child": "children", "man": "men", "woman": "women",
    "foot": "feet", "tooth": "teeth", "leaf": "leaves", "potato": "potatoes", "mango": "mangoes", "person": "people",
    "shelf": "shelves", "loaf": "loaves", "radio": "radios", "piano": "pianos", "ox": "oxen", "calf": "calves",
}  # fmt: skip
PLURALS_TO_ASK = [*_PLURALS, *OBJECTS, *FRUITS]


def plural(noun: str) -> str:
    """Return the plural of a noun of these lists."""
    if noun in _PLURALS:
        return _PLURALS[noun]
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def counted(number: int, noun: str) -> str:
    """Return `1 apple`, `3 apples`."""
    return f"{number} {noun if number == 1 else plural(noun)}"


def article(noun: str) -> str:
    """Return the noun after `a` or `an`."""
    return f"an {noun}" if noun[0].lower() in "aeiou" and not noun.startswith(("uni", "eu")) else f"a {noun}"


def capitalized(text: str) -> str:
    """Return text with its first character in upper case and the others as they are."""
    return text[:1].upper() + text[1:]


def listed(items: list[str]) -> str:
    """Return `a`, `a and b`, `a, b and c`."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def some_items(rng: Random, low: int, high: int) -> list[str]:
    """Draw `low` to `high` different things of one kind."""
    pools = (OBJECTS, FRUITS + VEGETABLES, list(ANIMALS), NAMES, CITIES, FOODS, COLOURS)
    return rng.sample(rng.choice(pools), rng.randint(low, high))

"""Domains of the SQL task: tables, their columns, and the words for them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Column:
  """A column and the words for it.

  Attributes:
    name: in SQL, and in questions with blanks for underscores.
    words: what a cell may hold, if texts; each of them once for the first
      column of a table, else a few of them, so that values repeat.
    low: smallest number, where there are no words.
    high: largest number.
    where: says that a row has the value, as in 'live in {}'.
  """

  name: str
  words: tuple[str, ...] = ()
  low: int = 0
  high: int = 0
  where: tuple[str, ...] = ()

  @property
  def spoken(self) -> str:
    return self.name.replace('_', ' ')


@dataclasses.dataclass(frozen=True)
class Sheet:
  """A table; the first column names its rows."""

  name: str
  singular: str
  columns: tuple[Column, ...]

  @property
  def numbers(self) -> list[Column]:
    return [column for column in self.columns[1:] if column.high]

  @property
  def groups(self) -> list[Column]:
    return [column for column in self.columns[1:] if column.where]


@dataclasses.dataclass(frozen=True)
class Domain:
  """Tables; `link` is the column of the first that names rows of the second."""

  sheets: tuple[Sheet, ...]
  link: str = ''


def _words(text: str) -> tuple[str, ...]:
  return tuple(text.split())


_PEOPLE = _words(
  'Ada Alan Alice Amir Anna Ben Bella Boris Carl Clara Cora Dan Dora Elias '
  'Ella Emma Eric Eva Felix Finn Grace Hana Hugo Ida Igor Ivan Jack Jane Joan '
  'Karl Kate Kim Lars Laura Leo Lena Lily Luca Mara Maria Mark Max Mia Milo '
  'Nina Noah Nora Olga Omar Oscar Otto Paul Petra Rita Rosa Ruth Sam Sara Sven '
  'Tara Theo Tom Uma Vera Victor Walter Yara Zoe'
)
_CITIES = _words(
  'Berlin Oslo Paris Rome Madrid Lisbon Vienna Prague Dublin Athens London '
  'Boston Chicago Denver Tokyo Kyoto Delhi Cairo Lima Quito Sydney Bergen '
  'Turin Porto'
)
_JOBS = _words(
  'baker doctor teacher lawyer nurse pilot farmer writer painter driver cook '
  'judge'
)
_PRODUCTS = _words(
  'apple bread cheese butter coffee tea sugar rice honey milk chair table lamp '
  'desk sofa shelf mirror carpet shirt coat hat scarf gloves boots socks belt '
  'pencil notebook ruler eraser stapler candle kettle spoon plate bowl'
)
_KINDS = _words('food furniture clothing office kitchen garden toys sports')
_BOOKS = _words(
  'Dracula Emma Ulysses Hamlet Macbeth Othello Persuasion Middlemarch Walden '
  'Candide Faust Inferno Odyssey Iliad Aeneid Beowulf Metamorphosis Dubliners '
  'Kim Nostromo Germinal Frankenstein Ivanhoe Siddhartha Solaris Dune Rebecca '
  'Beloved Neuromancer Foundation Utopia Leviathan'
)
_GENRES = _words('novel drama poetry horror history travel science romance')
_TEAMS = _words(
  'Lions Tigers Bears Eagles Hawks Falcons Wolves Foxes Sharks Dolphins '
  'Panthers Jaguars Bulls Rams Colts Ravens Cobras Vipers Giants Titans Rovers '
  'Rangers Wanderers United Comets Rockets'
)
_COUNTRIES = _words(
  'Norway Sweden Spain Italy France Germany Austria Poland Greece Ireland '
  'Brazil Peru Chile Mexico Canada Japan India Egypt Kenya Ghana'
)
_RIVERS = _words(
  'Amazon Nile Danube Rhine Volga Ganges Indus Mekong Congo Niger Thames Seine '
  'Loire Elbe Oder Tagus Ebro Po Tiber Yukon Ohio Hudson Parana Orinoco'
)
_PETS = _words(
  'Rex Bello Luna Coco Daisy Rocky Buddy Molly Bruno Simba Nala Oreo Ginger '
  'Shadow Tiger Pepper Cookie Lucky Pluto Balu Mimi Felix Toby Ruby Jasper'
)
_ANIMALS = _words('dog cat rabbit parrot hamster turtle horse goat')

_PERSON = Sheet(
  'people',
  'person',
  (
    Column('name', _PEOPLE),
    Column('age', low=18, high=90),
    Column('city', _CITIES, where=('live in {}', 'are from {}')),
    Column('job', _JOBS, where=('work as {}', 'have the job {}')),
  ),
)
_PRODUCT = Sheet(
  'products',
  'product',
  (
    Column('name', _PRODUCTS),
    Column('kind', _KINDS, where=('are of kind {}', 'belong to {}')),
    Column('price', low=2, high=99),
    Column('stock', low=5, high=300),
  ),
)
_BOOK = Sheet(
  'books',
  'book',
  (
    Column('title', _BOOKS),
    Column('genre', _GENRES, where=('are of genre {}', 'belong to {}')),
    Column('pages', low=60, high=900),
    Column('year', low=1800, high=2020),
  ),
)
_TEAM = Sheet(
  'teams',
  'team',
  (
    Column('name', _TEAMS),
    Column('city', _CITIES, where=('play in {}', 'are from {}')),
    Column('points', low=5, high=99),
    Column('goals', low=10, high=120),
  ),
)
_RIVER = Sheet(
  'rivers',
  'river',
  (
    Column('name', _RIVERS),
    Column('country', _COUNTRIES, where=('flow in {}', 'are in {}')),
    Column('length', low=100, high=7000),
    Column('depth', low=3, high=90),
  ),
)
_PET = Sheet(
  'pets',
  'pet',
  (
    Column('name', _PETS),
    Column('animal', _ANIMALS, where=('are of animal {}', 'are listed as {}')),
    Column('weight', low=1, high=80),
    Column('age', low=1, high=30),
  ),
)


def _events(name: str, singular: str, link: str, where: str, number: Column):
  """A table whose rows are numbered and name a row of another table."""
  linked = Column(link, where=(where,))
  return Sheet(name, singular, (Column('id', high=99), linked, number))


DOMAINS: dict[str, Domain] = {
  'people': Domain((_PERSON,)),
  'rivers': Domain((_RIVER,)),
  'pets': Domain((_PET,)),
  'shop': Domain(
    (
      _events(
        'orders',
        'order',
        'product',
        'are for {}',
        Column('quantity', low=1, high=60),
      ),
      _PRODUCT,
    ),
    'product',
  ),
  'library': Domain(
    (
      _events(
        'loans', 'loan', 'book', 'are of {}', Column('days', low=1, high=60)
      ),
      _BOOK,
    ),
    'book',
  ),
  'football': Domain(
    (
      _events(
        'matches',
        'match',
        'team',
        'are of {}',
        Column('spectators', low=100, high=5000),
      ),
      _TEAM,
    ),
    'team',
  ),
}

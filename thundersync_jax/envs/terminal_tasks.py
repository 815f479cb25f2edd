"""Terminal tasks: a generated directory tree, a wish, and what it comes to.

Each kind draws files, a question, the commands of a gold path, and the final
state that grants it, so that gold path and grader do not share code.
"""

import dataclasses
import random
from collections.abc import Callable

_FOLDER_NAMES = 'archive backup data docs inbox logs notes photos reports src'
_STEM_NAMES = (
  'alpha apple basil cedar delta ember fjord grape hazel iris jade kiwi lemon '
  'maple nutmeg olive pearl quartz raven sage tulip umber violet willow'
)
_WORD_LIST = (
  'amber arrow barn bell birch bread brook candle castle cloud copper crow '
  'dawn drum eagle fern field flame forest frost garden glass harbor hill '
  'honey island lake lamp leaf meadow moon oak ocean owl path pine rain river '
  'road rose sand shell silver sky snow star stone storm sun tide tree valley'
)
_FOLDERS, _STEMS = _FOLDER_NAMES.split(), _STEM_NAMES.split()
_WORDS = _WORD_LIST.split()
_EXTENSIONS = ['cfg', 'csv', 'dat', 'log', 'md', 'txt', 'tmp', 'xml']
_ANSWER = 'answer.txt'


@dataclasses.dataclass(frozen=True)
class Drawn:
  """One task.

  Attributes:
    question: what is asked for.
    files: path to text at the start.
    gold: commands of a gold path, one a turn.
    wanted: path to text at the end; white space around does not matter.
    absent: paths that must not be there at the end.
  """

  question: str
  files: dict[str, str]
  gold: list[str]
  wanted: dict[str, str]
  absent: list[str] = dataclasses.field(default_factory=list)


def _lines(stream: random.Random, low: int = 3, high: int = 8) -> list[str]:
  return stream.choices(_WORDS, k=stream.randint(low, high))


def _text(lines: list[str]) -> str:
  return ''.join(f'{line}\n' for line in lines)


def _tree(
  stream: random.Random, count: int = 4
) -> tuple[list[str], dict[str, str]]:
  """Three folders, and a few files in them, no name twice."""
  folders = stream.sample(_FOLDERS, 3)
  folders[1] = f'{folders[0]}/{folders[1]}'
  files = {}
  for stem in stream.sample(_STEMS, count):
    extension = stream.choice(_EXTENSIONS)
    path = f'{stream.choice(folders)}/{stem}.{extension}'
    files[path] = _text(_lines(stream))
  return folders, files


def _one_file(
  stream: random.Random, lines: list[str], extension: str
) -> tuple[str, str, dict[str, str]]:
  """A tree with one file of the extension: its top folder, path, all files."""
  folders, files = _tree(stream)
  files = {p: t for p, t in files.items() if not p.endswith(extension)}
  stem = stream.choice([s for s in _STEMS if all(s not in p for p in files)])
  path = f'{stream.choice(folders[:2])}/{stem}{extension}'
  files[path] = _text(lines)
  return folders[0], path, files


def count_lines(stream: random.Random) -> Drawn:
  lines = _lines(stream, 3, 30)
  extension = '.' + stream.choice(_EXTENSIONS)
  _, path, files = _one_file(stream, lines, extension)
  return Drawn(
    f'Write the number of lines of {path} to {_ANSWER}.',
    files,
    [f'wc -l < {path} > {_ANSWER}'],
    {**files, _ANSWER: str(len(lines))},
  )


def count_files(stream: random.Random) -> Drawn:
  folders, files = _tree(stream, stream.randint(5, 8))
  extension = stream.choice(sorted(files)).rpartition('.')[2]
  top = folders[0]
  below = [p for p in files if p.startswith(f'{top}/')]
  count = sum(p.endswith('.' + extension) for p in below)
  files[f'{top}/first.md'] = ''
  count += extension == 'md'
  return Drawn(
    f'Write how many .{extension} files there are below {top} to {_ANSWER}.',
    files,
    [f"find {top} -name '*.{extension}' | wc -l > {_ANSWER}"],
    {**files, _ANSWER: str(count)},
  )


def find_word(stream: random.Random) -> Drawn:
  folders, files = _tree(stream, stream.randint(4, 6))
  del folders
  path = stream.choice(sorted(files))
  word = stream.choice(_WORDS) + stream.choice(_WORDS)
  lines = files[path].splitlines()
  lines.insert(stream.randint(0, len(lines)), word)
  files[path] = _text(lines)
  return Drawn(
    f'One file contains the word {word}. Write its path to {_ANSWER}.',
    files,
    [f'grep -rl {word} * > {_ANSWER}'],
    {**files, _ANSWER: path},
  )


def rename(stream: random.Random) -> Drawn:
  folder = stream.choice(_FOLDERS)
  old, new = stream.sample(_EXTENSIONS, 2)
  kept = stream.choice([e for e in _EXTENSIONS if e not in (old, new)])
  stems = stream.sample(_STEMS, stream.randint(3, 6))
  renamed = stems[: stream.randint(2, len(stems) - 1)]
  files = {
    f'{folder}/{s}.{old if s in renamed else kept}': _text(_lines(stream))
    for s in stems
  }
  wanted = {
    f'{folder}/{s}.{new if s in renamed else kept}': files[
      f'{folder}/{s}.{old if s in renamed else kept}'
    ]
    for s in stems
  }
  command = f'for f in {folder}/*.{old}; do mv $f ${{f%.{old}}}.{new}; done'
  return Drawn(
    f'Rename each .{old} file in {folder} to end in .{new} instead.',
    files,
    [command],
    wanted,
    [f'{folder}/{s}.{old}' for s in renamed],
  )


def move(stream: random.Random) -> Drawn:
  _, files = _tree(stream, stream.randint(4, 7))
  extension = stream.choice(sorted(files)).rpartition('.')[2]
  moved = sorted(p for p in files if p.endswith(f'.{extension}'))
  target = stream.choice(['chosen', 'kept', 'moved', 'sorted', 'taken'])
  wanted = {
    f'{target}/{p.rpartition("/")[2]}' if p in moved else p: text
    for p, text in files.items()
  }
  return Drawn(
    f'Move all .{extension} files into a new folder {target}.',
    files,
    [
      f'mkdir {target}',
      f"find . -name '*.{extension}' -exec mv {{}} {target} \\;",
    ],
    wanted,
    moved,
  )


def sort_lines(stream: random.Random) -> Drawn:
  numbers, reverse = stream.random() < 0.5, stream.random() < 0.5
  if numbers:
    lines = [
      str(n) for n in stream.sample(range(1, 2000), stream.randint(4, 8))
    ]
    done = sorted(lines, key=int, reverse=reverse)
    order = 'largest number first' if reverse else 'smallest number first'
  else:
    lines = stream.sample(_WORDS, stream.randint(4, 8))
    done = sorted(lines, reverse=reverse)
    order = 'in reverse alphabetical order' if reverse else 'alphabetically'
  top, path, files = _one_file(stream, lines, '.txt')
  name = stream.choice(['sorted', 'ordered', 'result', 'out']) + '.txt'
  options = (' -n' if numbers else '') + (' -r' if reverse else '')
  return Drawn(
    f'Sort the lines of the only .txt file below {top}, {order}, into {name}.',
    files,
    [f"find {top} -name '*.txt'", f'sort{options} {path} > {name}'],
    {**files, name: _text(done)},
  )


def unique_lines(stream: random.Random) -> Drawn:
  few = stream.sample(_WORDS, stream.randint(3, 5))
  lines = few + stream.choices(few, k=stream.randint(2, 6))
  stream.shuffle(lines)
  _, path, files = _one_file(stream, lines, '.dat')
  return Drawn(
    f'Write the different lines of {path}, sorted, each once, to {_ANSWER}.',
    files,
    [f'sort -u {path} > {_ANSWER}'],
    {**files, _ANSWER: _text(sorted(few))},
  )


def extract_lines(stream: random.Random) -> Drawn:
  levels = ['DEBUG', 'ERROR', 'INFO', 'WARNING']
  level = stream.choice(levels)
  lines = [
    f'{stream.choice(levels)} {stream.choice(_WORDS)} {stream.randint(1, 99)}'
    for _ in range(stream.randint(5, 12))
  ]
  lines.append(f'{level} {stream.choice(_WORDS)} 0')
  top, path, files = _one_file(stream, lines, '.log')
  name = f'{level.lower()}s.txt'
  return Drawn(
    f'Copy the lines with {level} of the only .log file below {top} to {name}.',
    files,
    [f"find {top} -name '*.log'", f'grep {level} {path} > {name}'],
    {**files, name: _text([line for line in lines if level in line])},
  )


def extract_column(stream: random.Random) -> Drawn:
  names = stream.sample(['id', 'city', 'color', 'size', 'tree', 'year'], 3)
  rows = [stream.sample(_WORDS, 3) for _ in range(stream.randint(3, 6))]
  column = stream.randrange(3)
  lines = [','.join(row) for row in (names, *rows)]
  _, path, files = _one_file(stream, lines, '.csv')
  return Drawn(
    f'Write the column {names[column]} of {path}, without its header, to '
    f'{_ANSWER}.',
    files,
    [
      f'head -n 1 {path}',
      f'cut -d, -f{column + 1} {path} | tail -n +2 > {_ANSWER}',
    ],
    {**files, _ANSWER: _text([row[column] for row in rows])},
  )


def add_up(stream: random.Random) -> Drawn:
  numbers = [stream.randint(1, 99) for _ in range(stream.randint(3, 9))]
  lines = [f'{stream.choice(_WORDS)} {number}' for number in numbers]
  _, path, files = _one_file(stream, lines, '.dat')
  return Drawn(
    f'Write the sum of the numbers in {path} to {_ANSWER}.',
    files,
    [f"awk '{{s += $2}} END {{print s}}' {path} > {_ANSWER}"],
    {**files, _ANSWER: str(sum(numbers))},
  )


def replace_word(stream: random.Random) -> Drawn:
  lines = _lines(stream, 4, 9)
  old = stream.choice(lines)
  new = stream.choice([w for w in _WORDS if w not in lines])
  _, path, files = _one_file(stream, lines, '.cfg')
  done = [new if line == old else line for line in lines]
  return Drawn(
    f'In {path} replace each line {old} by {new}.',
    files,
    [f"sed -i 's/^{old}$/{new}/' {path}"],
    {**files, path: _text(done)},
  )


def delete(stream: random.Random) -> Drawn:
  folders, files = _tree(stream, stream.randint(4, 7))
  extension = stream.choice(sorted(files)).rpartition('.')[2]
  files[f'{folders[0]}/first.{extension}'] = ''
  gone = sorted(
    p
    for p in files
    if p.endswith(f'.{extension}') and p.startswith(f'{folders[0]}/')
  )
  return Drawn(
    f'Delete all .{extension} files below {folders[0]}, and no others.',
    files,
    [f"find {folders[0]} -name '*.{extension}' -delete"],
    {p: text for p, text in files.items() if p not in gone},
    gone,
  )


def join_files(stream: random.Random) -> Drawn:
  folder = stream.choice(_FOLDERS)
  stems = stream.sample(_STEMS, 3)
  files = {f'{folder}/{s}.txt': _text(_lines(stream, 1, 4)) for s in stems}
  first, second = stream.sample(sorted(files), 2)
  name = stream.choice(['all', 'both', 'joined', 'out']) + '.txt'
  return Drawn(
    f'Write {first} followed by {second} to {name}.',
    files,
    [f'cat {first} {second} > {name}'],
    {**files, name: files[first] + files[second]},
  )


def largest_file(stream: random.Random) -> Drawn:
  folder = stream.choice(_FOLDERS)
  stems = stream.sample(_STEMS, stream.randint(3, 5))
  sizes = stream.sample(range(2, 30), len(stems))
  files = {
    f'{folder}/{s}.{stream.choice(_EXTENSIONS)}': 'x' * size + '\n'
    for s, size in zip(stems, sizes, strict=True)
  }
  largest = max(files, key=lambda p: len(files[p]))
  return Drawn(
    f'Write the name of the largest file in {folder} to {_ANSWER}.',
    files,
    [f'ls -S {folder} | head -n 1 > {_ANSWER}'],
    {**files, _ANSWER: largest.rpartition('/')[2]},
  )


KINDS: dict[str, Callable[[random.Random], Drawn]] = {
  'add_up': add_up,
  'count_files': count_files,
  'count_lines': count_lines,
  'delete': delete,
  'extract_column': extract_column,
  'extract_lines': extract_lines,
  'find_word': find_word,
  'join_files': join_files,
  'largest_file': largest_file,
  'move': move,
  'rename': rename,
  'replace_word': replace_word,
  'sort_lines': sort_lines,
  'unique_lines': unique_lines,
}

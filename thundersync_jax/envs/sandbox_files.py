"""The files of a sandbox, handled from outside without trusting them.

What a model's program leaves behind may be a link to a file of the host, a
pipe that never answers, or a folder of a thousand levels. So each path is
opened part by part and no link is followed; only regular files are read.
"""

import contextlib
import dataclasses
import errno
import os
import pathlib
import secrets
import shutil
import stat
import subprocess
from collections.abc import Iterator

_MAX_DEPTH = 32  # levels of folders that are looked at
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FileError(Exception):
  """A path that cannot be read or written; the text is for the model too."""


def parts(path: str) -> tuple[str, ...]:
  """The names along a path below the working directory.

  Raises:
    FileError: if it is empty, absolute, climbs, or no file can have its name.
  """
  names = tuple(n for n in path.split('/') if n not in ('', '.'))
  try:
    encoded = path.encode()
  except UnicodeEncodeError:
    encoded = b'\0'
  if not names or path.startswith('/') or '..' in names or b'\0' in encoded:
    raise FileError(f'{path!r:.100}: give a path below the working directory')
  if len(names) > _MAX_DEPTH or max(map(len, names)) > 200:
    raise FileError(f'{path!r:.100}: the path is too long')
  return names


@dataclasses.dataclass(frozen=True)
class Folder:
  """A working directory, and how much of it may be read.

  Attributes:
    path: the folder on the host.
    uid: user id that new files are given to; None keeps the caller's.
    max_bytes: of one file.
    max_files: files and folders that are listed.
  """

  path: pathlib.Path
  uid: int | None
  max_bytes: int
  max_files: int

  def read(self, path: str) -> bytes:
    """The content of a regular file.

    Raises:
      FileError: if there is none, or it is larger than max_bytes.
    """
    names = parts(path)
    with _readable(path), self._folder(names[:-1]) as folder:
      opened = os.open(names[-1], _FILE, dir_fd=folder)
      with os.fdopen(opened, 'rb') as file:
        found = os.fstat(opened)
        # A second name could be that of a file outside.
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
          raise FileError(f'{path}: not a plain file')
        if found.st_size > self.max_bytes:
          raise FileError(
            f'{path}: {found.st_size} bytes, over the limit {self.max_bytes}'
          )
        return file.read(self.max_bytes)

  def write(self, path: str, content: bytes) -> None:
    """Writes a file, and the folders above it; replaces what is there.

    Raises:
      FileError: if it cannot be written, or is larger than max_bytes.
    """
    names = parts(path)
    if len(content) > self.max_bytes:
      raise FileError(
        f'{path}: {len(content)} bytes, over the limit {self.max_bytes}'
      )
    new = f'.{secrets.token_hex(8)}'
    with _readable(path), self._folder(names[:-1], make=True) as folder:
      flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
      opened = os.open(new, flags, 0o644, dir_fd=folder)
      with os.fdopen(opened, 'wb') as file:
        file.write(content)
        self._give(opened)
      try:
        os.replace(new, names[-1], src_dir_fd=folder, dst_dir_fd=folder)
      except OSError:
        os.unlink(new, dir_fd=folder)
        raise

  def make_folder(self, path: str) -> None:
    """Makes a folder and those above it, where there are none."""
    with _readable(path), self._folder(parts(path), make=True):
      pass

  def entries(self) -> Iterator[tuple[str, bool]]:
    """Path and whether it is a folder, of regular files and folders."""
    left, count = [()], 0
    while left:
      names = left.pop()
      with contextlib.suppress(OSError), self._folder(names) as folder:
        for name in sorted(os.listdir(folder)):
          count += 1
          if count > self.max_files:
            return
          mode = os.lstat(name, dir_fd=folder).st_mode
          if stat.S_ISDIR(mode) and len(names) < _MAX_DEPTH - 1:
            left.append((*names, name))
            yield '/'.join((*names, name)), True
          elif stat.S_ISREG(mode):
            yield '/'.join((*names, name)), False

  @contextlib.contextmanager
  def _folder(self, names: tuple[str, ...], make: bool = False):
    """A descriptor of the folder; follows no link on the way."""
    opened = os.open(self.path, _FOLDER)
    try:
      for name in names:
        if make:
          with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=opened)
            below = os.open(name, _FOLDER, dir_fd=opened)
            self._give(below)
            os.close(below)
        below = os.open(name, _FOLDER, dir_fd=opened)
        os.close(opened)
        opened = below
      yield opened
    finally:
      os.close(opened)

  def _give(self, opened: int) -> None:
    if self.uid is not None:
      os.fchown(opened, self.uid, self.uid)


_REASONS = {
  errno.ENOENT: 'no such file',
  errno.ENOTDIR: 'not a folder',
  errno.ELOOP: 'a link, which is not followed',
  errno.EISDIR: 'a folder',
  errno.ENXIO: 'not a plain file',
}


@contextlib.contextmanager
def _readable(path: str):
  """Turns errors of the system into one that a model can read."""
  try:
    yield
  except OSError as error:
    reason = _REASONS.get(error.errno, os.strerror(error.errno or 0).lower())
    raise FileError(f'{path}: {reason}') from error


def delete(path: pathlib.Path) -> None:
  """Deletes a folder, however deep it is and whatever its modes are."""
  try:
    shutil.rmtree(path)
  except FileNotFoundError:
    return
  except (OSError, RecursionError):
    for command in (['chmod', '-R', 'u+rwx'], ['rm', '-rf']):
      subprocess.run([*command, '--', str(path)], check=False, timeout=60)

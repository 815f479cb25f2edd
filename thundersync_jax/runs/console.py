"""What a run says on the console: our lines, and the warnings of others."""

import logging as python_logging
import os

from absl import logging

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def quiet_libraries() -> None:
  """Shows information of this package only; warnings of everything."""
  logging.set_verbosity(logging.INFO)
  logging.get_absl_handler().addFilter(_wanted)


def _wanted(record: python_logging.LogRecord) -> bool:
  ours = record.pathname.startswith(_PACKAGE)
  return ours or record.levelno >= python_logging.WARNING

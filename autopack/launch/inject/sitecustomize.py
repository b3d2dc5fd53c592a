"""Start autopack under ``autopack run``, then give way to another sitecustomize.

This file stands first on PYTHONPATH. Any interpreter that a script starts may run it, even one
without autopack or older than autopack needs.
"""

import os
import sys

_here = os.path.dirname(__file__)
sys.path[:] = [entry for entry in sys.path if entry != _here]

try:
    from autopack.launch.launcher import start
except Exception as error:
    if os.environ.pop("AUTOPACK_STARTED", "") == str(os.getpid()):
        message = "autopack: not started, %s cannot import it: %s\n"
        sys.stderr.write(message % (sys.executable, error))
else:
    start()

# Where there is no other, this raises the ImportError that `site` expects, and no sitecustomize
# stays behind.
sys.modules.pop("sitecustomize", None)
import sitecustomize  # noqa: E402, F401

"""Python runs this file when it starts: see :mod:`.macos_python`. The root of the repository is on
PYTHONPATH, too."""

from tests.kernels.metal.macos import macos_python

macos_python.substitute()
